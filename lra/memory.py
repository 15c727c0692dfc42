"""Memory: how malloc is set up, peaks of a phase, and what a training run holds.

CUDA counts the allocator's bytes. A Linux process has a resident set whose peak, ``VmHWM``, can be reset; the peak of
``getrusage`` cannot, and what earlier work needed would count for ever. Elsewhere nothing is known: ``None``, not 0.
"""

import ctypes
import logging
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h
GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"

log = logging.getLogger(__name__)

_keeps_memory = False
"""Whether malloc was told to keep freed memory: then fragments of what an earlier run freed hide a later one's peak."""
_used_before = False


def tune_allocator() -> str:
    """Let glibc's malloc keep freed memory, and say what was done, as ``allocator`` does.

    torch's CPU allocator is plain malloc: by default every block above 32 MiB is mapped and unmapped at each
    operation, and the page faults make large n 2 to 4 times slower for every backend except flash.
    """
    global _keeps_memory
    if GLIBC:
        mallopt = ctypes.CDLL(None).mallopt
        _keeps_memory = bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1) and mallopt(_TOP_PAD, 64 << 20))
    return allocator()


def trim_malloc() -> None:
    """Give freed memory back to the system where malloc can: a later peak would be hidden in it."""
    if GLIBC:
        ctypes.CDLL(None).malloc_trim(0)


def allocator() -> str:
    """How malloc is set up in this process, as the result records it."""
    return "glibc tuned for reuse" if _keeps_memory else "default"


def _status_bytes(field: str) -> int | None:
    """A memory field of ``/proc/self/status`` in bytes, ``None`` outside Linux."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


@dataclass
class Peak:
    """Largest amounts seen, in bytes; ``None`` where they cannot be measured."""

    used: int | None = None
    """CUDA: in tensors. Linux CPU: resident set. Above what was held when the gauge was made."""
    reserved: int | None = None
    """CUDA: what torch's allocator holds for tensors, free blocks and fragments included."""
    device: int | None = None
    """CUDA: what is taken of the device, other processes, context and library workspaces included."""

    def include(self, other: "Peak") -> None:
        """Raise every amount to that of ``other``."""
        for name, value in vars(other).items():
            known = [x for x in (getattr(self, name), value) if x is not None]
            setattr(self, name, max(known, default=None))


class MemoryGauge:
    """Peak memory since the last reset."""

    def __init__(self, device: torch.device) -> None:
        global _used_before
        self.device = device
        self.kind: str | None = None
        self._kept = 0
        hidden = _keeps_memory and _used_before
        _used_before = True
        if device.type == "cuda":
            self.kind = "cuda allocated"
            self._base = torch.cuda.memory_allocated(device)
        elif hidden:
            log.warning("peak memory is null: only the first run of a process has one; `lra sweep` gives each its own")
        elif _status_bytes("VmHWM") is not None and self._reset_linux():
            self.kind = "process resident set"
            trim_malloc()  # untuned malloc too keeps what was freed below a block in use: enough to hide a small model
            self._base = _status_bytes("VmRSS") or 0

    @staticmethod
    def _reset_linux() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def trim(self) -> None:
        """Give back what the allocator kept, so that the next peak is not hidden below it; later uses pay for that."""
        if self.kind == "cuda allocated":
            torch.cuda.empty_cache()
        elif self.kind:
            trim_malloc()

    def reset(self) -> None:
        """Start a new peak."""
        if self.kind == "cuda allocated":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.kind:
            self._reset_linux()
            self._kept = (_status_bytes("VmRSS") or 0) if _keeps_memory else 0

    def peak(self) -> int | None:
        """Bytes in use at most, see ``Peak.used``; ``None`` if unknown or hidden by memory that malloc kept."""
        if self.kind is None:
            return None
        if self.kind == "cuda allocated":
            return torch.cuda.max_memory_allocated(self.device) - self._base
        highest = _status_bytes("VmHWM") or 0
        return max(0, highest - self._base) if highest > self._kept else None

    def read(self) -> Peak:
        """All that is known of the peak."""
        if self.kind != "cuda allocated":
            return Peak(self.peak())
        free, total = torch.cuda.mem_get_info(self.device)
        # the allocator returns nothing to the device by itself, so what is taken now is what was taken at the peak
        return Peak(self.peak(), torch.cuda.max_memory_reserved(self.device), total - free)


@dataclass(frozen=True)
class Held:
    """Bytes that training holds from step to step."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Held:
    """What ``model`` and ``optimizer`` hold. A gradient that is not there now counts like its parameter."""
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [] if optimizer is None else [x for state in optimizer.state.values() for x in state.values()]
    return Held(
        _bytes([*model.parameters(), *model.buffers()]),
        _bytes(p if p.grad is None else p.grad for p in trained),
        _bytes(x for x in states if isinstance(x, torch.Tensor)),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors)}
    return sum(storages.values())
