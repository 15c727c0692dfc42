"""``lra doctor``: what this machine has, and what to do about what it lacks."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import lra.tasks
from attention import kernels
from attention.kernels.dispatch import missing, ops
from attention.kernels.inputs import EMULATES_HALF
from lra.config import compose_run
from lra.data.arrays import MANIFEST
from lra.environment import cpu_name
from lra.errors import UserError
from lra.regimes import POINTS
from lra.tracking import wandb_mode

Line = tuple[str, str]


def _python() -> Iterator[Line]:
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    for package in ("torch", "datasets", "hydra-core", "wandb", "pandas"):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "missing: run scripts/reproduce, or pip install -e ."


def _devices() -> Iterator[Line]:
    bf16 = "; bf16 is emulated: use trainer.precision=fp32" if EMULATES_HALF else ""
    yield "CPU", f"{cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads{bf16}"
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no device"
        yield "CUDA", f"none ({why})"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _compilers() -> Iterator[Line]:
    for tool in (os.environ.get("CXX", "c++"), "nvcc"):
        yield tool, shutil.which(tool) or "not found"


def _kernels() -> Iterator[Line]:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for op in ops():
            lacking = [f"not {name}: {why}" for name, why in missing(op, device).items()]
            yield f"{op} ({device})", "; ".join([", ".join(kernels.available(op, device)), *lacking])


def _data() -> Iterator[Line]:
    for name in lra.tasks.REGISTRY:
        config = compose_run([f"task={name}"])
        task = lra.tasks.load(name)
        ready, folders = [], set()
        for regime, length in POINTS.items():
            try:
                folder = task.folder(replace(config.task, length=length or config.task.length), Path(config.data_dir))
            except UserError:
                continue  # a length that the task does not have
            if (folder / MANIFEST).is_file():
                ready.append(regime)
                folders.add(folder)
        found = [f"ready at {', '.join(ready)}"] if ready else []
        others = len({path.parent for path in Path(config.data_dir, name).glob(f"[!.]*/{MANIFEST}")} - folders)
        found += [f"{others} with other options, see lra data list"] if others else []
        yield name, "; ".join(found) or f"nothing prepared: lra data prepare {name}"


def _tracking() -> Iterator[Line]:
    mode, reason = wandb_mode("auto")
    yield "W&B", f"{mode}, {reason}"


def main(arguments: list[str]) -> int:
    """Print the report."""
    if arguments in (["-h"], ["--help"]):
        print("usage: lra doctor\n\nTell what this machine has: software, devices, compilers, kernels, data, W&B.")
        return 0
    if arguments:
        raise UserError(f"lra doctor takes no arguments, found {' '.join(arguments)}")
    sections = {
        "Software": _python,
        "Devices": _devices,
        "Compilers": _compilers,
        "Kernels, best first": _kernels,
        "Data": _data,
        "Tracking": _tracking,
    }
    for title, section in sections.items():
        print(title)
        for name, text in section():
            print(f"  {name:<24} {text}")
    return 0
