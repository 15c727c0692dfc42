"""C++ kernels for the CPU: built on first use with the system's compiler, kept in a cache.

``csrc/<name>.cpp`` registers its functions with ``TORCH_LIBRARY(lra_<name>, m)``; ``missing(name)`` builds it and makes
them callable as ``torch.ops.lra_<name>.<function>``. The cache key covers the sources, the flags, torch, the compiler
and the CPU, so that one home directory can serve different machines. ``LRA_NATIVE_DIR`` moves the cache,
``LRA_NATIVE=0`` turns native kernels off.
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
    except subprocess.SubprocessError as error:
        problem = f"{compiler} cannot build csrc/{name}.cpp: {_first_error(error)}"
        remedy = "install a working g++ (Debian: apt install g++) or set CXX"
    except (OSError, RuntimeError) as error:
        problem = f"csrc/{name}.cpp cannot be built in or loaded from {cache_dir()}: {error}"
        remedy = "set LRA_NATIVE_DIR to a folder that can be written"
    else:
        return None
    log.warning("%s; the plain torch kernel runs instead (%s)", problem, remedy)
    return f"{problem}; {remedy}"


def _first_error(error: subprocess.SubprocessError) -> str:
    """The line of the compiler's output that says what went wrong."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [str(error)]
    return next((line for line in lines if "error" in line.lower()), lines[-1]).strip()


def _build(name: str, compiler: str) -> Path:
    """Path of the library, built unless it is whole in the cache; one process builds, others wait for it."""
    source = SOURCES / f"{name}.cpp"
    library = cache_dir() / f"{name}-{_key(source, compiler)}.so"
    if _whole(library):
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _whole(library):
            # a folder of its own: nothing that a killed build leaves behind can disturb the next one
            with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{name}-") as folder:
                log.info("building the native kernel %s (once, about half a minute)", name)
                built, digest = Path(folder) / "built.so", Path(folder) / "digest"
                _compile(compiler, source, built)
                digest.write_text(_digest(built))
                os.replace(digest, _digest_of(library))
                os.replace(built, library)
    return library


def _compile(compiler: str, source: Path, library: Path) -> None:
    from torch.utils import cpp_extension

    command = [compiler, *FLAGS, "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [str(source), "-o", str(library)]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)


def _whole(library: Path) -> bool:
    """Whether the cached library is what was built: loading one that was cut short would kill the process."""
    try:
        return _digest(library) == _digest_of(library).read_text()
    except OSError:
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _digest_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


@cache
def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    sources = [path.read_text() for path in (source, *sorted(SOURCES.glob("*.h")))]
    parts = (*sources, *FLAGS, torch.__version__, version, platform.machine(), _cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
