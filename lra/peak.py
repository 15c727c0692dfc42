"""How fast a device multiplies matrices: what the arithmetic of a network can be measured against."""

import logging
from functools import cache

import torch

from lra.meter import timed

WIDTH = {"cpu": 2048, "cuda": 8192}
"""Of the largest product; a smaller one is taken where it would take longer than ``SECONDS``."""
SMALLEST = 256
SECONDS = 0.3
REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

log = logging.getLogger(__name__)


@cache
def matmul_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s of the fastest of several square matrix products in the dtype of ``precision``; ``None`` if it has none.

    Measured once a process, with the threads and the TF32 setting of the moment.
    """
    if device.type not in WIDTH:
        return None
    try:
        return max(matmul_rates(device, DTYPES[precision]))
    except RuntimeError as error:
        log.debug("the matmul peak is null: %s", error)
        return None


def matmul_rates(device: torch.device, dtype: torch.dtype) -> list[float]:
    """FLOP/s of ``REPEATS`` products of two square matrices."""
    width = min(SMALLEST, WIDTH[device.type])
    # a CPU without arithmetic in this dtype needs minutes for the largest product, and shows its peak in a small one
    while width < WIDTH[device.type] and 8 * min(_products(device, dtype, width, repeats=2)) < SECONDS:
        width *= 2
    return [2 * width**3 / seconds for seconds in _products(device, dtype, width, repeats=REPEATS)]


def _products(device: torch.device, dtype: torch.dtype, width: int, *, repeats: int) -> list[float]:
    """Seconds of each product; one more goes before them and is dropped."""
    a, b = (torch.rand(width, width, device=device).to(dtype) for _ in range(2))
    return [timed(device, lambda: a @ b) for _ in range(repeats + 1)][1:]
