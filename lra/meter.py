"""The only place that reads clocks and memory counters.

Wall-clock is split into accounts (data, compute, evaluation, logging); every account ends with a device
synchronise, so asynchronous kernels are charged to the account that launched them.
"""

import ctypes
import logging
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lra.results import Accounts

log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h

_keeps_memory = False
"""Whether malloc was told to keep freed memory: then what an earlier run freed hides a later one's peak."""


def tune_allocator() -> str:
    """Let glibc's malloc keep freed memory, and say what was done, as ``allocator`` does.

    torch's CPU allocator is plain malloc: by default every block above 32 MiB is mapped and unmapped at each
    operation, and the page faults make large n 2 to 4 times slower for every backend except flash.
    """
    global _keeps_memory
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return allocator()
    mallopt = ctypes.CDLL(None).mallopt
    tuned = mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1) and mallopt(_TOP_PAD, 64 << 20)
    _keeps_memory = bool(tuned)
    return allocator()


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


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds that one call of ``run`` takes, the work that it queues on the device included."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


_used_before = False


class MemoryGauge:
    """Peak memory since the last reset, above what was held when the gauge was made.

    CUDA: the allocator's peak. Linux CPU: ``VmHWM``, which can be reset (``ru_maxrss`` cannot). Elsewhere: None.
    """

    def __init__(self, device: torch.device) -> None:
        global _used_before
        self.device = device
        self.kind: str | None = None
        hidden = _keeps_memory and _used_before
        _used_before = True
        if device.type == "cuda":
            self.kind = "cuda allocated"
            self._base = torch.cuda.memory_allocated(device)
        elif hidden:
            log.warning("peak memory is null: only the first run of a process has one; `lra sweep` gives each its own")
        elif _status_bytes("VmHWM") is not None and self._reset_linux():
            self.kind = "process resident set"
            self._base = _status_bytes("VmRSS") or 0

    @staticmethod
    def _reset_linux() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def reset(self) -> None:
        """Start a new peak."""
        if self.kind == "cuda allocated":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.kind:
            self._reset_linux()

    def peak(self) -> int | None:
        """Bytes."""
        if self.kind is None:
            return None
        if self.kind == "cuda allocated":
            return torch.cuda.max_memory_allocated(self.device) - self._base
        return max(0, (_status_bytes("VmHWM") or 0) - self._base)


class Meter:
    """Accounts, step times and tokens of one training run."""

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self.device = device
        self.warmup_steps = warmup_steps
        self.memory = MemoryGauge(device)
        self._totals: dict[str, float] = defaultdict(float)
        self._step_seconds: list[float] = []
        self._real: list[int] = []
        self._real_total = 0
        self._padded: list[int] = []
        self._peak: int | None = None

    def now(self) -> float:
        """Seconds on a monotonic clock after all queued work of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def account(self, name: str) -> Iterator[None]:
        """Charge the block to account ``name``."""
        start = self.now()
        try:
            yield
        finally:
            self._totals[name] += self.now() - start

    @contextmanager
    def step(self, *, real_tokens: int, padded_tokens: int) -> Iterator[None]:
        """Charge the block to ``compute`` as one optimiser step over so many positions."""
        start = self.now()
        yield
        seconds = self.now() - start
        self._totals["compute"] += seconds
        self._step_seconds.append(seconds)
        self._real.append(real_tokens)
        self._real_total += real_tokens
        self._padded.append(padded_tokens)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Charge the block to ``evaluation`` and keep its memory out of the training peak."""
        self.close_training_window()
        with self.account("evaluation"):
            yield
        self.memory.reset()

    def start(self) -> None:
        """Begin the first training window."""
        self.memory.reset()

    def close_training_window(self) -> None:
        """Fold the peak since the last reset into the training peak."""
        peak = self.memory.peak()
        if peak is not None:
            self._peak = max(self._peak or 0, peak)

    def state(self) -> dict:
        """What was measured so far, as tensors and plain values, for a run that goes on in another process."""
        self.close_training_window()
        return {
            "totals": dict(self._totals),
            "step_seconds": torch.tensor(self._step_seconds, dtype=torch.float64),
            "real": torch.tensor(self._real, dtype=torch.int64),
            "padded": torch.tensor(self._padded, dtype=torch.int64),
            "peak": self._peak,
        }

    def restore(self, state: dict) -> None:
        """Go on from ``state``."""
        self._totals.update(state["totals"])
        self._step_seconds = state["step_seconds"].tolist()
        self._real, self._padded = state["real"].tolist(), state["padded"].tolist()
        self._real_total = sum(self._real)
        self._peak = state["peak"]

    @property
    def real_tokens(self) -> int:
        """Real tokens of all steps so far."""
        return self._real_total

    @property
    def train_seconds(self) -> float:
        """Seconds spent on data and optimiser steps so far."""
        return self._totals["data"] + self._totals["compute"]

    def recent_step_ms(self, count: int) -> float:
        """Median of the last ``count`` steps."""
        return 1e3 * statistics.median(self._step_seconds[-count:])

    def report(self) -> dict:
        """The measured fields of a ``ResultRow``; ``None`` for what could not be measured."""
        accounts = Accounts(**{name: self._totals.get(name) for name in ("data", "compute", "evaluation", "logging")})
        timed = self._step_seconds[self.warmup_steps :]
        real = sum(self._real[self.warmup_steps :])
        processed = sum(self._padded)
        quartiles = statistics.quantiles(timed, n=4) if len(timed) > 1 else None
        return {
            "seconds": accounts,
            "steps": len(self._step_seconds),
            "step_ms": 1e3 * statistics.median(timed) if timed else None,
            "step_ms_quartiles": [1e3 * quartiles[0], 1e3 * quartiles[2]] if quartiles else None,
            "warmup_steps_dropped": min(self.warmup_steps, len(self._step_seconds)),
            "steps_per_second": len(timed) / sum(timed) if timed else None,
            "tokens_per_second": real / sum(timed) if timed else None,
            "padded_share": 1 - sum(self._real) / processed if processed else None,
            "peak_memory_bytes": self._peak,
            "memory_kind": self.memory.kind,
        }
