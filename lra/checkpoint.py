"""Checkpoints: everything that a killed run needs to go on bit for bit, and the weights that validation chose.

A file is replaced as a whole, so that a crash leaves the old one or the new one. Reading executes nothing: only
tensors and plain values are accepted, and only those that belong there.
"""

import io
import logging
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lra.errors import UserError
from lra.results import write_atomic

FORMAT = 1
KEYS = {
    "format", "config_hash", "step", "validated", "pending", "best", "accumulation", "notes",
    "model", "optimizer", "meter", "rng",
}  # fmt: skip
KEPT = 2
"""Newest resumable checkpoints on disk; the older one is for the case that the newer is damaged."""

log = logging.getLogger(__name__)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` so that ``path`` always holds a whole file, the old one or the new one."""
    # through memory: torch's own writer hides a full disk behind an error of its own
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomic(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Read a file of ``save`` onto the CPU; ``UserError`` if it is none, or holds more than tensors and values."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except pickle.UnpicklingError:
        # torch's text would advise to execute what is in the file
        raise UserError(f"{path}: not a checkpoint (damaged, or it holds more than tensors and values)") from None
    except Exception as error:
        # torch raises a different type for every way in which a file can be broken
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not a checkpoint ({reason})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: expected the fields of a checkpoint, found a {type(state).__name__}")
    return state


def load_weights(path: Path, model: nn.Module) -> int:
    """Load the weights of ``path`` into ``model``; returns the step at which they were saved."""
    state = load(path)
    try:
        model.load_state_dict(state["model"])
        return int(state["step"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: not a checkpoint of this model ({reason}); delete it and train again") from None


def rng_state(device: torch.device) -> dict[str, Any]:
    """Every random number generator of this process, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
    }


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where ``rng_state`` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


class Checkpoints:
    """The folder of a run's checkpoints: the newest two, and the best weights that they refer to."""

    def __init__(self, folder: Path, config_hash: str) -> None:
        self.folder = folder
        self._hash = config_hash
        self._kept: list[tuple[Path, int]] = []
        """Files of this process, oldest first, each with the step of the best weights at that time."""

    def best(self, step: int) -> Path:
        """Where the best weights are, if they are those of ``step``."""
        return self.folder / f"best-{step:08d}.pt"

    def save_best(self, step: int, model: nn.Module) -> None:
        """Keep the weights of ``step`` as the best; earlier best ones go when no checkpoint refers to them."""
        save(self.best(step), {"step": step, "model": model.state_dict()})

    def save(self, state: dict[str, Any]) -> Path:
        """Write a resumable checkpoint and delete what neither it nor the one before needs."""
        path = self.folder / f"step-{state['step']:08d}.pt"
        save(path, {"format": FORMAT, "config_hash": self._hash, **state})
        best = state["best"]["step"] if state["best"] else -1
        self._kept = [kept for kept in self._kept if kept[0] != path][-(KEPT - 1) :] + [(path, best)]
        needed = {kept for kept, _ in self._kept} | {self.best(step) for _, step in self._kept}
        # the dotted ones are what a process left that was killed while it wrote
        for old in (path for pattern in ("step-*.pt", "best-*.pt", ".*.pt.*") for path in self.folder.glob(pattern)):
            if old not in needed:
                old.unlink(missing_ok=True)
        return path

    def latest(self) -> dict[str, Any] | None:
        """The newest whole checkpoint of this configuration, ``None`` if there is none.

        A damaged one is passed over for the one before; one of another configuration is refused.
        """
        problems = []
        for path in sorted(self.folder.glob("step-*.pt"), reverse=True):
            try:
                state = self._checked(path)
            except UserError as error:
                problems.append(error)
                continue
            for problem in problems:
                log.warning("%s; going on from the one before", problem)
            self._kept = [(path, state["best"]["step"] if state["best"] else -1)]
            return state
        if problems:
            raise UserError(f"{problems[0]}; start anew with resume=never, which keeps this directory aside")
        return None

    def _checked(self, path: Path) -> dict[str, Any]:
        state = load(path)
        if set(state) != KEYS or state["format"] != FORMAT:
            odd = sorted(map(str, set(state) ^ KEYS)) or [f"format {state['format']}"]
            raise UserError(f"{path}: expected a checkpoint of format {FORMAT}, found {', '.join(odd)}")
        if state["config_hash"] != self._hash:
            raise UserError(
                f"{path}: it belongs to a run with other settings (hash {state['config_hash']}, this one is "
                f"{self._hash}); `lra resume {self.folder.parent}` says which differ"
            )
        if state["best"]:
            load(self.best(state["best"]["step"]))  # a damaged one must not show only after the training
        return state
