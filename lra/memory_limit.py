"""Running out of memory as something that can be told, limited and answered."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lra.errors import UserError
from lra.words import count

_SIGNS = ("can't allocate memory", "out of memory", "not enough memory", "bad_alloc", "cannot allocate memory")
_PRIMITIVE = ("could not create a primitive", "could not execute a primitive", "could not create a memory")
"""What oneDNN says when anything fails; where memory is limited it is taken for that."""
_limited = False


class OutOfMemory(RuntimeError):
    """Memory ended, with the place where it did."""

    def __init__(self, cause: BaseException, *, rows: int, length: int) -> None:
        first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        super().__init__(f"out of memory with {count(rows, 'row')} of {length} tokens at once: {first}")
        self.rows, self.length = rows, length


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ended, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    signs = (*_SIGNS, *_PRIMITIVE) if _limited else _SIGNS
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


@contextmanager
def memory_limit(gib: float, device: torch.device) -> Iterator[None]:
    """Let allocations fail that bring the private data of this process above what it is now plus ``gib`` GiB.

    Linux and CPU only; 0 is no limit. Libraries and mapped files do not count (``RLIMIT_DATA``).
    """
    if not gib:
        yield
        return
    if device.type != "cpu" or sys.platform != "linux":
        raise UserError(f"trainer.memory_limit_gib={gib}: it can be set for the CPU on Linux only; leave it out here")
    import resource

    global _limited
    # the threads that compute start now: their stacks count, and a thread that cannot start ends the process
    torch.zeros(1 << 18).add_(1)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    used = int(fields["VmData"].split()[0]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    _limited = True
    try:
        yield
    finally:
        _limited = False
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
