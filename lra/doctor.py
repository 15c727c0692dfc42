"""``lra doctor``: what this machine has, and what to do about what it lacks."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import lra.tasks
from attention import kernels
from attention.kernels.dispatch import ops
from lra.config import compose_run
from lra.environment import cpu_name
from lra.errors import UserError
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
    yield "CPU", f"{cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
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
            yield f"{op} ({device})", ", ".join(kernels.available(op, device))


def _data() -> Iterator[Line]:
    for name in lra.tasks.REGISTRY:
        for regime in ("native", "short", "medium", "long", "extreme"):
            try:
                config = compose_run([f"task={name}", f"regime={regime}"])
                folder = lra.tasks.load(name).folder(config.task, Path(config.data_dir))
            except UserError as error:
                yield f"{name} {regime}", str(error)
                continue
            ready = (folder / "manifest.json").is_file()
            yield (
                f"{name} {regime}",
                str(folder) if ready else f"not prepared: lra data prepare {name} regime={regime}",
            )
        known = sorted(folder.parent.glob("[!.]*/manifest.json"))
        yield f"{name}, all", ", ".join(p.parent.name for p in known) or "nothing prepared"


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
