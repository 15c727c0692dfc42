"""The only place that reads clocks; memory, energy and compilation have gauges of their own.

Wall-clock is split into accounts (compile, data, compute, evaluation, logging); a second is in one of them only. Every
account ends with a device synchronise, so asynchronous kernels are charged to the account that launched them. The
parts of compute (forward, backward, optimizer) are told apart by events on the device, which cost no synchronise.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import nn

from lra.compilation import CompileWatch
from lra.energy import EnergyGauge
from lra.laps import DeviceLaps, HostLaps
from lra.memory import Held, MemoryGauge, Peak, allocator, held, tune_allocator
from lra.results import Accounts, Memory, Parts

__all__ = ["MemoryGauge", "Meter", "allocator", "timed", "tune_allocator"]

PARTS = ("forward", "backward", "optimizer")
COLUMNS = ("seconds", "timed", "real", "padded", *PARTS)
"""What is kept of every step."""


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


class Meter:
    """Accounts, step times, tokens, memory and energy of one training run."""

    def __init__(self, device: torch.device, *, warmup_steps: int, compiled: bool = False) -> None:
        """The first ``warmup_steps`` of the process do not count; ``compiled``: torch.compile may be at work."""
        self.device = device
        self.warmup_steps = warmup_steps
        self.memory = MemoryGauge(device)
        self.shapes: Counter[tuple[int, int]] = Counter()
        """``(sequences, positions)`` of every batch of the timed steps."""
        self._energy = EnergyGauge(device)
        self._watch = CompileWatch() if compiled else None
        self._laps = DeviceLaps(self._compile_seconds) if device.type == "cuda" else HostLaps(self._clock)
        self._totals: dict[str, float] = defaultdict(float)
        self._steps: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._real_total = 0
        self._steps_here = 0
        self._compiling_steps = 0
        self._training, self._evaluation = Peak(), Peak()
        self._evaluated = False
        self._held: Callable[[], Held] | None = None
        self._joules: float | None = None
        self._joules_from: float | None = None
        self._compiled_before: dict[str, float] = {}

    def track(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Tell the bytes of weights, gradients and optimiser state apart from the rest of the training peak."""
        self._held = lambda: held(model, optimizer)

    def now(self) -> float:
        """Seconds on a monotonic clock that stands still while torch.compile works; the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()

    def _clock(self) -> float:
        return time.perf_counter() - self._compile_seconds()

    def _compile_seconds(self) -> float:
        return self._watch.seconds if self._watch else 0.0

    @contextmanager
    def account(self, name: str) -> Iterator[None]:
        """Charge the block to account ``name``."""
        start = self.now()
        try:
            yield
        finally:
            self._totals[name] += self.now() - start

    @contextmanager
    def step(self, *, real_tokens: int, padded_tokens: int, shapes: Sequence[tuple[int, int]] = ()) -> Iterator[None]:
        """Charge the block to ``compute`` as one optimiser step over so many positions.

        ``shapes``: ``(sequences, positions)`` of each of its batches. A step that fails is charged but no step.
        """
        start, compiled = self.now(), self._compile_seconds()
        self._laps.begin()
        try:
            yield
            self._laps.lap("optimizer")
        finally:
            seconds = self.now() - start
            self._totals["compute"] += seconds
        compiling = self._compile_seconds() > compiled
        warm = self._steps_here >= self.warmup_steps
        self._steps_here += 1
        self._compiling_steps += compiling and warm
        parts = self._laps.seconds()
        if len(parts) == 1:  # nobody told them apart
            parts = {}
        found = {"seconds": seconds, "timed": warm and not compiling, "real": real_tokens, "padded": padded_tokens}
        for name, column in self._steps.items():
            column.append(found[name] if name in found else parts.get(name, 0.0))
        self._real_total += real_tokens
        if found["timed"]:
            self.shapes.update(shapes)

    def lap(self, part: str) -> None:
        """In a step: what ran since the last lap was ``forward`` or ``backward``; what remains is ``optimizer``."""
        self._laps.lap(part)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Charge the block to ``evaluation``; its memory and energy are kept apart from those of training."""
        self.close_training_window()
        if not self._evaluated:
            self.memory.trim()
            self._evaluated = True
        self.memory.reset()
        try:
            with self.account("evaluation"):
                yield
        finally:
            self._evaluation.include(self.memory.read())
            if (self._evaluation.used or 0) > (self._training.used or 0):
                self.memory.trim()
            self.start()

    def start(self) -> None:
        """Begin a training window."""
        self.memory.reset()
        self._joules_from = self._energy.joules()

    def close_training_window(self) -> None:
        """Fold what the window has shown so far into the figures of training; it goes on."""
        self._training.include(self.memory.read())
        joules = self._energy.joules()
        if joules is not None and self._joules_from is not None:
            self._joules = (self._joules or 0.0) + joules - self._joules_from
        self._joules_from = joules

    @property
    def train_seconds(self) -> float:
        """Seconds spent on data and optimiser steps so far."""
        return self._totals["data"] + self._totals["compute"]

    @property
    def real_tokens(self) -> int:
        """Real tokens of all steps so far."""
        return self._real_total

    @property
    def timed_steps(self) -> int:
        """Steps that count: after the warm-up, nothing compiled in them."""
        return int(sum(self._steps["timed"]))

    def recent_step_ms(self, count: int) -> float:
        """Median of the last ``count`` steps."""
        return 1e3 * statistics.median(self._steps["seconds"][-count:])

    def _timed(self, name: str) -> list[float]:
        """A column of the steps that count."""
        return [value for value, counts in zip(self._steps[name], self._steps["timed"]) if counts]

    def report(self) -> dict:
        """The measured fields of a ``ResultRow``; ``None`` for what could not be measured."""
        seconds, steps = self._timed("seconds"), len(self._steps["seconds"])
        total, processed = sum(seconds), sum(self._steps["padded"])
        accounts = Accounts(**{name: self._totals.get(name) for name in ("data", "compute", "evaluation", "logging")})
        compiled = self._compilation()
        accounts.compile = self._totals.get("compile")
        if compiled:
            accounts.compile = (accounts.compile or 0.0) + compiled["seconds"]
        parts = PARTS if any(self._steps["forward"]) else ()
        return {
            "seconds": accounts,
            "compute_seconds": Parts(**{name: sum(self._steps[name]) for name in parts}),
            "steps": steps,
            "step_ms": _median_ms(seconds),
            "step_ms_quartiles": _quartiles_ms(seconds),
            "compute_ms": Parts(**{name: _median_ms(self._timed(name)) for name in parts}),
            "warmup_steps_dropped": steps - len(seconds) - self._compiling_steps,
            "compiling_steps_dropped": self._compiling_steps if compiled else None,
            "compiled_graphs": compiled.get("graphs"),
            "graph_breaks": compiled.get("graph_breaks"),
            "steps_per_second": len(seconds) / total if seconds else None,
            "tokens_per_second": sum(self._timed("real")) / total if seconds else None,
            "padded_tokens_per_second": sum(self._timed("padded")) / total if seconds else None,
            "padded_share": 1 - sum(self._steps["real"]) / processed if processed else None,
            "peak_memory_bytes": self._training.used,
            "memory_kind": self.memory.kind,
            "memory": self._memory(),
            "train_energy_joules": self._joules,
        }

    def close(self) -> None:
        """Let go of what the meter listens to."""
        if self._watch:
            self._watch.close()

    def state(self) -> dict:
        """What was measured so far, as tensors and plain values, for a run that goes on in another process."""
        self.close_training_window()
        return {
            "totals": dict(self._totals),
            "steps": {name: torch.tensor(column, dtype=torch.float64) for name, column in self._steps.items()},
            "compiling_steps": self._compiling_steps,
            "shapes": [[*shape, times] for shape, times in self.shapes.items()],
            "training": asdict(self._training),
            "evaluation": asdict(self._evaluation),
            "joules": self._joules,
            "compilation": self._compilation(),
        }

    def restore(self, state: dict) -> None:
        """Go on from ``state``; the next steps are warm-up again."""
        self._totals.update(state["totals"])
        self._steps = {name: column.tolist() for name, column in state["steps"].items()}
        self._real_total = int(sum(self._steps["real"]))
        self._compiling_steps = state["compiling_steps"]
        self.shapes = Counter({(sequences, length): times for sequences, length, times in state["shapes"]})
        self._training, self._evaluation = Peak(**state["training"]), Peak(**state["evaluation"])
        self._joules = state["joules"]
        self._compiled_before = dict(state["compilation"])

    def _compilation(self) -> dict[str, float]:
        """Seconds, graphs and graph breaks of torch.compile, those of earlier processes included; empty without it."""
        if self._watch is None:
            return self._compiled_before
        return {
            name: getattr(self._watch, name) + self._compiled_before.get(name, 0)
            for name in ("seconds", "graphs", "graph_breaks")
        }

    def _memory(self) -> Memory:
        training, evaluation = self._training, self._evaluation
        found = Memory(
            evaluation_peak=evaluation.used,
            training_reserved=training.reserved,
            evaluation_reserved=evaluation.reserved,
            training_device=training.device,
            evaluation_device=evaluation.device,
        )
        if self._held:
            parts = self._held()
            found.weights, found.gradients, found.optimizer = parts.weights, parts.gradients, parts.optimizer
            if training.used is not None:
                found.activations = max(0, training.used - parts.weights - parts.gradients - parts.optimizer)
        return found


def _median_ms(seconds: list[float]) -> float | None:
    return 1e3 * statistics.median(seconds) if seconds else None


def _quartiles_ms(seconds: list[float]) -> list[float] | None:
    if len(seconds) < 2:
        return None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return [1e3 * low, 1e3 * high]
