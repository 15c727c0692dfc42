"""``lra bench ops``: every kernel of every op, plain baselines and peers, timed in turn in one process."""

import argparse
import json
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import torch

from lra import bench_cases, bench_measure, bench_peers, bench_report, bench_targets
from lra.bench_workload import DTYPES, Setting
from lra.environment import device_name, environment, git_state
from lra.errors import UserError
from lra.meter import tune_allocator
from lra.peak import matmul_rates
from lra.results import write_atomic

SCHEMA_VERSION = 1
COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Well above the caches."""


class _Parser(argparse.ArgumentParser):
    """One line for a bad argument, as everywhere in ``lra``."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"lra bench ops: {message}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _lengths(text: str) -> list[int]:
    # ascending, so that a long run shows something soon
    return sorted({_positive(part) for part in text.split(",")})


def _ops(text: str) -> list[str]:
    present = bench_cases.present()
    for op in text.split(","):
        if op not in present:
            raise argparse.ArgumentTypeError(f"op {op!r} is unknown; choose from {', '.join(present)}")
    return list(dict.fromkeys(text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lra bench ops", description="Time the attention ops, their baselines and their peers.")
    parser.add_argument("--lengths", type=_lengths, default=[512, 2048], metavar="N,...", help="default 512,2048")
    parser.add_argument("--ops", type=_ops, default=bench_cases.present(), metavar="OP,...", help="default all")
    parser.add_argument("--passes", choices=("train", "forward"), default="train")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--rounds", type=_positive, default=9, help="default 9")
    parser.add_argument("--batch", type=_positive, default=4, help="default 4")
    parser.add_argument("--heads", type=_positive, default=4, help="default 4")
    parser.add_argument("--head-width", type=_positive, default=32, help="default 32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", action="store_true", help="peak memory too, a process a case")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json")
    return parser


def main(arguments: list[str]) -> int:
    """Measure and print."""
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["ops", *arguments]
    if arguments[:1] != ["ops"]:
        raise UserError(f"lra bench times the ops only: lra bench ops; found {' '.join(arguments) or 'nothing'}")
    options = _parser().parse_args(arguments[1:])
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu")
    files = _output_files(options.out)
    document = run(options)
    page = bench_report.markdown(document)
    print(page, end="")
    if files:
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        for path, content in zip(files, (page, text)):
            write_atomic(path, content)
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _output_files(prefix: Path | None) -> list[Path]:
    """Where to write, found writable before anything is measured."""
    if prefix is None:
        return []
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".md", ".json")]
    try:
        for path in files:
            content = path.read_bytes() if path.exists() else None
            write_atomic(path, content or b"")
            if content is None:
                path.unlink()
    except (OSError, ValueError) as error:
        raise UserError(f"--out {prefix}: cannot write {prefix}.md and .json ({error})") from None
    return files


def run(options: argparse.Namespace) -> dict:
    """The document: what ran where, every sample, and the targets."""
    allocator = tune_allocator()
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    copy = bench_measure.Copy(device, COPY_BYTES[device.type])
    peaks = matmul_rates(device, dtype)
    results = []
    for length in options.lengths:
        for op in options.ops:
            print(f"{op}, n = {length} ...", file=sys.stderr, flush=True)
            setting = Setting(options.batch, options.heads, options.head_width, length, options.passes, dtype, device)
            result = bench_measure.measure(op, setting, options.rounds, copy)
            if options.memory:
                for case in result["cases"]:
                    if case["samples"]:
                        case["peak_bytes"] = bench_measure.peak_bytes(op, case["name"], setting)
            results.append(result)
    results.sort(key=lambda r: (options.ops.index(r["op"]), r["length"]))
    document = {
        "schema": SCHEMA_VERSION,
        **{name: getattr(options, name) for name in ("batch", "heads", "head_width", "passes", "dtype", "device")},
        "rounds": options.rounds,
        "memory": options.memory,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device_name": device_name(options.device),
        "threads": torch.get_num_threads(),
        "allocator": allocator,
        "packages": {"Python": platform.python_version(), "torch": torch.__version__, **bench_peers.versions()},
        "environment": environment(),
        "git": git_state(),
        "matmul_flops_per_second": {"median": statistics.median(peaks), "samples": peaks},
        "results": results,
    }
    document["targets"] = bench_targets.targets(document)
    return document
