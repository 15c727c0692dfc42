"""C++ kernels for the CPU: built on first use with the system's compiler, kept in a cache.

``csrc/<name>.cpp`` registers its functions with ``TORCH_LIBRARY(lra_<name>, m)``; ``load(name)`` makes them callable as
``torch.ops.lra_<name>.<function>``. The cache key covers the source, the flags, torch, the compiler and the CPU, so
that one home directory can serve different machines. ``LRA_NATIVE_DIR`` moves the cache, ``LRA_NATIVE=0`` turns
native kernels off.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where built libraries are kept."""
    if "LRA_NATIVE_DIR" in os.environ:
        return Path(os.environ["LRA_NATIVE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lra-harness" / "native"


@cache
def missing(name: str) -> str | None:
    """Build and load ``csrc/<name>.cpp``; why that is impossible here and what to install, or None when it worked."""
    if os.environ.get("LRA_NATIVE") == "0":
        return "LRA_NATIVE=0 turns native kernels off"
    if sys.platform != "linux":
        return "native kernels are built on Linux only"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "there is no C++ compiler; install g++ (Debian: apt install g++) or set CXX"
    try:
        torch.ops.load_library(str(_build(name, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines()
        reason = f"building csrc/{name}.cpp with {compiler} failed: {lines[0].strip() if lines else error!r}"
        log.warning("%s; the plain torch kernel runs instead", reason)
        return reason
    return None


def _build(name: str, compiler: str) -> Path:
    """Path of the library, built unless it is in the cache; one process builds, others wait for it."""
    source = SOURCES / f"{name}.cpp"
    library = cache_dir() / f"{name}-{_key(source, compiler)}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # a folder of its own: nothing that a killed build leaves behind can disturb the next one
            with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{name}-") as folder:
                log.info("building the native kernel %s (once, about half a minute)", name)
                os.replace(_compile(name, source, folder), library)
    return library


def _compile(name: str, source: Path, folder: str) -> Path:
    from torch.utils import cpp_extension

    # torch calls ninja by name, and the one that pip installed lies beside this interpreter
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((beside, os.environ.get("PATH", "")))
    cpp_extension.load(
        name=f"lra_{name}",
        sources=[str(source)],
        extra_cflags=list(FLAGS),
        extra_ldflags=["-fopenmp"],
        build_directory=folder,
        is_python_module=False,
    )
    return Path(folder) / f"lra_{name}.so"


@cache
def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    parts = (source.read_text(), *FLAGS, torch.__version__, version, platform.machine(), _cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
