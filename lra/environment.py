"""What a run ran on."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "numpy", "hydra-core", "wandb", "datasets", "triton")


def cpu_name() -> str:
    """Marketing name of the processor, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def environment() -> dict:
    """Versions and machine; ``None`` for a package that is not installed."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in PACKAGES},
    }


@cache
def git_state() -> dict:
    """Commit of the sources and whether they were changed; ``None`` outside a git checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}
