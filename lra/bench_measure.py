"""Times the cases of a workload in turn, so that drift of the machine meets all of them alike."""

import math
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lra import bench_cases
from lra.bench_workload import Case, Setting, Workload
from lra.errors import UserError
from lra.meter import timed

BUDGET_SECONDS = 8.0
"""Of timed calls a case; a slow one gets fewer rounds, at least one."""
LIMIT_SECONDS = 30.0
LIMIT_BYTES = 8 << 30
SAMPLE_SECONDS = 0.01
"""A sample repeats a fast call until it takes about so long."""
MEMORY_SECONDS = 300
"""Limit of a memory measurement, process start and imports included."""
PROBE_SHARE = 4
"""The time of a call is predicted from this part of the length."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference between kernels of an op, as a share of the largest value."""


@dataclass
class Timing:
    """What was measured of one case; sample i is seconds per call in round i."""

    name: str
    kind: str
    note: str = ""
    """Why it was skipped or stopped."""
    warmup_calls: int = 0
    calls_per_sample: int = 1
    samples: list[float] = field(default_factory=list)
    difference: float | None = None
    """Largest difference from the reference, as a share of its largest value; outputs and gradients."""
    peak_bytes: int | None = None


class Copy:
    """Bandwidth of a large copy, read plus written, and with it the time that a number of bytes takes."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._source = torch.ones(size // 4, device=device)
        self._target = torch.empty_like(self._source)
        self.bytes_per_second()

    def bytes_per_second(self) -> float:
        seconds = timed(self._device, lambda: self._target.copy_(self._source))
        return 2 * self._source.numel() * self._source.itemsize / seconds


def measure(op: str, setting: Setting, rounds: int, copy: Copy) -> dict:
    """All cases of ``op`` in ``rounds`` interleaved rounds; every sample, and the bandwidth in each round."""
    workload = bench_cases.BUILDERS[op](setting)
    timings = {case.name: Timing(case.name, case.kind) for case in workload.cases}
    probe = bench_cases.BUILDERS[op](replace(setting, length=-(-setting.length // PROBE_SHARE)))
    ready = _warm_up(workload, probe, timings, setting)
    bandwidth = []
    for _ in range(rounds):
        bandwidth.append(copy.bytes_per_second())
        for case in ready:
            _sample(case, timings[case.name], setting.device)
    return {
        "op": op,
        "length": setting.length,
        "plain": workload.plain,
        "remark": workload.remark,
        "compulsory_bytes": workload.bytes,
        "flops": workload.flops,
        "copy_bytes_per_second": bandwidth,
        "missing": [vars(entry) for entry in workload.missing],
        "cases": [vars(timing) for timing in timings.values()],
    }


def _sample(case: Case, timing: Timing, device: torch.device) -> None:
    """One round of ``case``, unless its budget is spent."""
    calls = timing.calls_per_sample
    if timing.samples and calls * (sum(timing.samples) + timing.samples[-1]) > BUDGET_SECONDS:
        timing.note = f"budget of {BUDGET_SECONDS:g} s spent"
        return

    def repeat() -> None:
        for _ in range(calls):
            case.call()

    timing.samples.append(timed(device, repeat) / calls)


def _warm_up(workload: Workload, probe: Workload, timings: dict[str, Timing], setting: Setting) -> list[Case]:
    """The cases that can run: called once or twice, sized, and found to agree."""
    probes = {case.name: case for case in probe.cases}
    results: dict[str, list[Tensor]] = {}
    ready = []
    for case in workload.cases:
        timing = timings[case.name]
        timing.note = _refusal(case, probes[case.name], setting.device)
        if timing.note:
            continue
        seconds, result, timing.note = _try(case, setting.device)
        if result is None:
            continue
        timing.warmup_calls = 1
        if seconds < BUDGET_SECONDS / 8:
            # the first call also pays for page faults and lazy initialisation
            seconds = timed(setting.device, case.call)
            timing.warmup_calls = 2
        timing.calls_per_sample = max(1, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-6)))
        outputs, gradients = result
        results[case.name] = [workload.view(outputs)] if workload.view else [*outputs, *gradients]
        ready.append(case)
    _compare(workload, results, timings, setting)
    return ready


def _refusal(case: Case, probe: Case, device: torch.device) -> str:
    """Why ``case`` is not run at this length: too large or too slow, or its probe failed; empty if it is run."""
    if case.scratch > LIMIT_BYTES:
        return f"skipped: about {case.scratch / 2**30:.0f} GiB, more than {LIMIT_BYTES / 2**30:.0f}"
    # the first call may compile or load something
    for _ in range(2):
        seconds, result, note = _try(probe, device)
        if result is None:
            return note
        predicted = seconds * PROBE_SHARE**case.growth
        if predicted <= LIMIT_SECONDS:
            break
    if predicted > LIMIT_SECONDS:
        return f"skipped: about {predicted:.0f} s a call, more than {LIMIT_SECONDS:.0f}"
    return ""


def _try(case: Case, device: torch.device) -> tuple[float, tuple | None, str]:
    """Seconds and result of one call, or None and why there is none."""
    results: list[tuple] = []
    try:
        seconds = timed(device, lambda: results.append(case.call()))
    except torch.OutOfMemoryError:
        return 0.0, None, "skipped: out of memory"
    except ValueError as error:
        return 0.0, None, f"skipped: {error}"
    except Exception as error:
        # whatever another package raises must not end the run of the others
        if case.kind != "peer":
            raise
        first = str(error).partition("\n")[0]
        return 0.0, None, f"skipped: {type(error).__name__}: {first}"
    return seconds, results[0], ""


def _compare(workload: Workload, results: dict[str, list[Tensor]], timings: dict[str, Timing], s: Setting) -> None:
    """Note every case's difference from the reference; a kernel or baseline beyond the tolerance is an error."""
    reference = next((name for name in ("reference", workload.plain) if name in results), None)
    if reference is None:
        return
    for case in workload.cases:
        if case.name not in results or case.name == reference:
            continue
        difference = max(map(_difference, results[case.name], results[reference]))
        if math.isfinite(difference):
            timings[case.name].difference = difference
        else:
            timings[case.name].note = "gives NaN or inf"
        if case.kind != "peer" and difference > TOLERANCE[s.dtype]:
            raise UserError(
                f"{workload.op} at length {s.length}: {case.name} differs from {reference} by {difference:.1e} of the "
                f"largest value, allowed are {TOLERANCE[s.dtype]:g}; nothing is timed until they agree"
            )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest value; inf where one is not finite."""
    scale = expected.double().abs().max().item()
    difference = (found.double() - expected.double()).abs().max().item() / (scale or 1.0)
    return difference if math.isfinite(difference) else math.inf


def peak_bytes(op: str, name: str, setting: Setting) -> int | None:
    """Peak memory of one call in a fresh process, None where it cannot be measured.

    There the default allocator returns freed blocks, so that the resident set tells what is held.
    """
    command = [sys.executable, "-m", "lra.bench_memory", op, name, setting.encode()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    last = done.stdout.strip().rpartition("\n")[2]
    return int(last) if done.returncode == 0 and last.isdigit() else None


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))
