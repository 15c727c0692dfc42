"""Peak memory of one case, in a process of its own: ``python -m lra.bench_memory OP CASE SIZES``."""

import gc
import sys
from dataclasses import replace

from lra import bench_cases
from lra.bench_workload import Case, Setting, parse_setting
from lra.meter import MemoryGauge

WARM_UP_LENGTH = 32


def _find(op: str, name: str, setting: Setting) -> Case:
    return next(case for case in bench_cases.BUILDERS[op](setting).cases if case.name == name)


def growth(op: str, name: str, setting: Setting) -> int | None:
    """Bytes that one call holds at most above its inputs, after a small call has loaded what it needs."""
    _find(op, name, replace(setting, length=min(WARM_UP_LENGTH, setting.length))).call()
    case = _find(op, name, setting)
    gc.collect()
    gauge = MemoryGauge(setting.device)
    gauge.reset()
    case.call()
    return gauge.peak()


if __name__ == "__main__":
    peak = growth(sys.argv[1], sys.argv[2], parse_setting(sys.argv[3]))
    print("unknown" if peak is None else peak)
