"""How fast a device multiplies matrices: what the arithmetic of a network can be measured against."""

import logging
from functools import cache

import torch

from lra.meter import timed

WIDTH = {"cpu": 1024, "cuda": 8192}
SECONDS = 0.3
"""Repeats end after so long."""
REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

log = logging.getLogger(__name__)


@cache
def matmul_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s of the fastest of several square matrix products in the dtype of ``precision``; ``None`` if it has none.

    Measured once a process, with the threads and the TF32 setting of the moment.
    """
    width = WIDTH.get(device.type)
    if width is None:
        return None
    try:
        a, b = (torch.rand(width, width, device=device).to(DTYPES[precision]) for _ in range(2))
        timed(device, lambda: a @ b)
        seconds = [timed(device, lambda: a @ b)]
        while len(seconds) < REPEATS or sum(seconds) < SECONDS:
            seconds.append(timed(device, lambda: a @ b))
    except RuntimeError as error:
        log.debug("the matmul peak is null: %s", error)
        return None
    return 2 * width**3 / min(seconds)
