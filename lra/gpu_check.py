"""``scripts/gpu_check``: golden tests, times and rooflines of every kernel that runs on a CUDA device.

A bound is the larger of the bytes that a kernel must move over the measured bandwidth and its FLOPs over the
measured matmul rate. It is a floor for inputs and outputs moved once, not what an algorithm could reach.
"""

import argparse
import datetime
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lra.gpu_cases import CPU_SIZES, CUDA_SIZES, Case, cases
from lra.results import write_atomic

ROOT = Path(__file__).resolve().parents[1]
TIMES_S, TESTS_S = 200, 240
"""Seconds for times and for golden tests: kernels that are compiled and tuned on first use can take minutes."""


def synchronise(device: str) -> None:
    """Wait for the device; nothing to do on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str, budget: float = 0.5) -> float:
    """Median time of a call, warmed up; as many calls as the budget allows, 3 to 50."""

    def once() -> float:
        start = time.perf_counter()
        run()
        synchronise(device)
        return time.perf_counter() - start

    warm = [once() for _ in range(3)]
    return statistics.median(once() for _ in range(max(3, min(50, int(budget / max(warm[-1], 1e-6))))))


def limits(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Measured bytes/s of a copy (read and write) and FLOP/s of a square matmul."""
    count, side = (2**28, 8192) if device == "cuda" else (2**16, 64)
    source = torch.empty(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device, dtype=dtype)
    return {
        "bytes_per_s": 2 * count / seconds(lambda: target.copy_(source), device),
        "flop_per_s": 2 * side**3 / seconds(lambda: a @ a, device),
    }


def measure(case: Case, device: str, rates: dict[str, float], deadline: float = math.inf) -> dict[str, object]:
    """Times, memory and bound of one case; what went wrong under ``error`` if it cannot run or had no time left."""
    size = case.size
    row: dict[str, object] = {"op": case.op, "kernel": case.kernel, "padded": case.padded, **vars(size)}
    moved = sum(x.numel() * x.element_size() for x in case.inputs)
    moved += case.inputs[-1].numel() * case.inputs[-1].element_size()
    row["bound_forward_s"] = max(moved / rates["bytes_per_s"], case.flops / rates["flop_per_s"])
    if time.monotonic() > deadline:
        return row | {"error": f"left out, {TIMES_S} s had passed"}
    try:
        with torch.no_grad():
            row["forward_s"] = seconds(lambda: case.run(*case.inputs), device)
        grad = torch.ones_like(case.run(*case.inputs))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        row["train_s"] = seconds(lambda: torch.autograd.grad(case.run(*case.inputs), case.inputs, grad), device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    except ValueError as error:
        row["refused"] = str(error)
    except (RuntimeError, NotImplementedError) as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return row


def golden_tests() -> dict[str, object]:
    """The tests marked gpu, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/attention"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S)
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "summary": f"not done after {TESTS_S} s", "failed": []}
    lines = done.stdout.strip().splitlines()
    return {
        "exit_code": done.returncode,
        "summary": lines[-1] if lines else done.stderr[-200:],
        "failed": [line for line in lines if line.startswith("FAILED")],
    }


def table(rows: list[dict[str, object]]) -> list[str]:
    """Markdown lines: one a case, times in milliseconds."""
    lines = [
        "| op | kernel | B, H, L, E | padded | forward ms | fwd+bwd ms | bound ms | of bound | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['op']} | {row['kernel']} | {row['batch']}, {row['heads']}, {row['length']}, {row['width']} "
        start += f"| {'yes' if row['padded'] else 'no'} | "
        if "train_s" not in row:
            lines.append(f"{start}{row.get('refused') or row.get('error')} | | | | |")
            continue
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
        bound = row["bound_forward_s"]
        lines.append(
            f"{start}{row['forward_s'] * 1e3:.3f} | {row['train_s'] * 1e3:.3f} | {bound * 1e3:.3f} "
            f"| {bound / row['forward_s']:.0%} | {peak} |"
        )
    return lines


def report(result: dict[str, object]) -> str:
    """The whole result as Markdown."""
    rates, tests = result["limits"], result["tests"]
    lines = [
        f"# {result['device']}, {result['date']}",
        "",
        f"torch {result['torch']}, {result['dtype']}; measured {rates['bytes_per_s'] / 1e9:.0f} GB/s (copy) and "
        f"{rates['flop_per_s'] / 1e12:.1f} TFLOP/s (matmul). The bound counts inputs and outputs moved once; a padded "
        "case has lengths uniform in (0, L], its bound is that of the full length.",
        "",
        f"Golden tests: {tests['summary'] if tests else 'not run'}",
        *([f"- {line}" for line in tests["failed"]] if tests else []),
        "",
        *table(result["rows"]),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if all ran, 1 if a test or a case failed, 2 without a device."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--no-tests", action="store_true", help="times only")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is visible; this needs a GPU and a CUDA build of torch", file=sys.stderr)
        return 2
    device, on_gpu = options.device, options.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rates = limits(device, dtype)
    deadline = time.monotonic() + TIMES_S
    rows = [
        measure(case, device, rates, deadline)
        for size in (CUDA_SIZES if on_gpu else CPU_SIZES)
        for case in cases(size, device, dtype)
    ]
    result = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "dtype": str(dtype),
        "limits": rates,
        "tests": None if options.no_tests else golden_tests(),
        "rows": rows,
    }
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    stem = options.out / f"gpu-{name}-{result['date']}"
    write_atomic(stem.with_suffix(".json"), json.dumps(result, indent=1) + "\n")
    write_atomic(stem.with_suffix(".md"), report(result))
    print(report(result))
    failed = any("error" in row for row in rows) or (result["tests"] or {}).get("exit_code", 0) not in (0, 5)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
