"""One name per op, several kernels behind it: who can run where, which is best, and which one really ran."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op. ``run`` takes the op's own arguments."""

    name: str
    run: Callable
    devices: tuple[str, ...] = DEVICES
    missing: Callable[[], str | None] = lambda: None
    """Why the kernel cannot run on this machine and what to install, or None when it can."""
    refuses: Callable[..., str | None] = lambda *args, **kwargs: None
    """Why the kernel cannot take these arguments and what to change, or None when it can."""


_OPS: dict[str, list[Kernel]] = {}
_used = threading.local()
_stand_in: Callable | None = None


def register(op: str, kernels: list[Kernel]) -> None:
    """Declare the kernels of ``op``, best first."""
    _OPS[op] = kernels


def ops() -> list[str]:
    """The names of all ops."""
    return list(_OPS)


def _kernels(op: str) -> list[Kernel]:
    if op not in _OPS:
        raise ValueError(f"op {op!r} is unknown; choose one of {', '.join(_OPS)}")
    return _OPS[op]


def _kind(device: str) -> str:
    kind, _, index = str(device).partition(":")
    if kind not in DEVICES or (index and not index.isdecimal()):
        raise ValueError(f"device {device!r} is unknown; kernels run on {' | '.join(DEVICES)}")
    return kind


def available(op: str, device: str) -> list[str]:
    """Names that ``kernel=`` accepts for ``op`` on ``device`` ("cpu", "cuda"), best first."""
    kind = _kind(device)
    return [k.name for k in _kernels(op) if kind in k.devices and k.missing() is None]


def missing(op: str, device: str) -> dict[str, str]:
    """The kernels of ``op`` for ``device`` that cannot run on this machine, each with the reason."""
    kind = _kind(device)
    reasons = {k.name: k.missing() for k in _kernels(op) if kind in k.devices}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def last_used(op: str) -> str:
    """Name of the kernel that ran in this thread's last call of ``op``; ``ValueError`` if there was none."""
    _kernels(op)
    name = getattr(_used, op, None)
    if name is None:
        raise ValueError(f"op {op!r} has not run in this thread yet; call it first")
    return name


@contextmanager
def replaced(stand_in: Callable) -> Iterator[None]:
    """Give every call to ``stand_in(op, *arguments)`` instead of a kernel: to look at what is asked of an op."""
    global _stand_in
    _stand_in = stand_in
    try:
        yield
    finally:
        _stand_in = None


def call(op: str, kernel: str, device: torch.device, *args: object, **kwargs: object) -> object:
    """Run ``op`` with the named kernel, or for ``auto`` with the best one that takes these arguments."""
    if _stand_in is not None:
        return _stand_in(op, *args, **kwargs)
    candidates = _kernels(op)
    if kernel != "auto":
        candidates = [k for k in candidates if k.name == kernel]
        if not candidates:
            raise ValueError(
                f"attention.kernel={kernel!r} is unknown for {op}; on {device.type} choose one of "
                f"auto, {', '.join(available(op, device.type))}"
            )
    reason = None
    for candidate in candidates:
        if device.type in candidate.devices:
            reason = candidate.missing() or candidate.refuses(*args, **kwargs)
        else:
            reason = f"it runs on {', '.join(candidate.devices)} only"
        if reason is None:
            # an op computes in the dtype of what it is given: autocast would round exponents and sums to bf16
            with torch.autocast(device.type, enabled=False):
                result = candidate.run(*args, **kwargs)
            setattr(_used, op, candidate.name)
            return result
    raise ValueError(
        f"kernel {kernel!r} of {op} cannot run on {device.type}: {reason}; "
        f"attention.kernel=auto takes the best of {', '.join(available(op, device.type))}"
    )
