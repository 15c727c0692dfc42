"""C++ sources built on first use with the system's compiler, kept in a cache; needs no torch.

The cache key covers the sources, the flags, the compiler and the CPU, so that one home directory can serve different
machines. ``LRA_NATIVE_DIR`` moves the cache, ``LRA_NATIVE=0`` turns native code off.
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
from collections.abc import Callable
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where built libraries are kept."""
    if "LRA_NATIVE_DIR" in os.environ:
        return Path(os.environ["LRA_NATIVE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lra-harness" / "native"


def load(
    source: Path,
    loader: Callable[[str], object],
    *,
    flags: tuple[str, ...],
    against: Callable[[], list[str]] = list,
    version: str = "",
    instead: str,
) -> str | None:
    """Build ``source`` and give the library's path to ``loader``.

    ``against`` lists further arguments for what ``source`` is built against, in ``version``. Returns None, or why
    this is impossible here and what to install; ``instead`` says what runs then.
    """
    if os.environ.get("LRA_NATIVE") == "0":
        return "LRA_NATIVE=0 turns native kernels off"
    if sys.platform != "linux":
        return "native kernels are built on Linux only"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "there is no C++ compiler; install g++ (Debian: apt install g++) or set CXX"
    name = f"{source.parent.name}/{source.name}"
    try:
        loader(str(_build(source, compiler, flags, against, version)))
    except subprocess.SubprocessError as error:
        problem = f"{compiler} cannot build {name}: {_first_error(error)}"
        remedy = "install a working g++ (Debian: apt install g++) or set CXX"
    except (OSError, RuntimeError) as error:
        problem = f"{name} cannot be built in or loaded from {cache_dir()}: {error}"
        remedy = "set LRA_NATIVE_DIR to a folder that can be written"
    else:
        return None
    log.warning("%s; %s (%s)", problem, instead, remedy)
    return f"{problem}; {remedy}"


def _first_error(error: subprocess.SubprocessError) -> str:
    """The line of the compiler's output that says what went wrong."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [str(error)]
    return next((line for line in lines if "error" in line.lower()), lines[-1]).strip()


def _build(source: Path, compiler: str, flags: tuple[str, ...], against: Callable[[], list[str]], version: str) -> Path:
    """Path of the library, built unless it is whole in the cache; one process builds, others wait for it."""
    library = cache_dir() / f"{source.stem}-{_key(source, compiler, flags, version)}.so"
    if _whole(library):
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _whole(library):
            # a folder of its own: nothing that a killed build leaves behind can disturb the next one
            with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{source.stem}-") as folder:
                log.info("building the native kernel %s (once, up to half a minute)", source.stem)
                built, digest = Path(folder) / "built.so", Path(folder) / "digest"
                command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(built), *against()]
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
                digest.write_text(_digest(built))
                os.replace(digest, _digest_of(library))
                os.replace(built, library)
    return library


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
def _key(source: Path, compiler: str, flags: tuple[str, ...], version: str) -> str:
    compiler_version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    sources = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*sources, *flags, version, compiler_version, platform.machine(), _cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
