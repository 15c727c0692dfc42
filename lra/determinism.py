"""Deterministic algorithms where torch has them, and the names of those where it has none."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[list[str]]:
    """Ask torch for deterministic algorithms; the list fills with those that it could not make so."""
    surprises: list[str] = []
    if not wanted:
        yield surprises
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    show = warnings.showwarning

    def note(message: Warning | str, *rest: object, **named: object) -> None:
        text = str(message).splitlines()[0]
        if "deterministic" not in text:
            show(message, *rest, **named)
        elif text not in surprises:
            surprises.append(text)

    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.showwarning = note
    try:
        yield surprises
    finally:
        warnings.showwarning = show
        torch.use_deterministic_algorithms(False)
