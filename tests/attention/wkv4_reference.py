"""WKV-4 by its definition, quadratic, in float64; and the golden vectors where the checkout has them.

Shapes: B batch, L sequence length, C channels.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"


def golden(name: str) -> dict[str, Tensor]:
    """The arrays of a golden file; skips the test where the files are absent."""
    path = GOLDEN / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"golden vectors are not here: {path}")
    with np.load(path) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference as a share of the largest wanted value."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-300)).item()


def wkv4_by_definition(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    bidirectional: bool = False,
) -> Tensor:
    """``y_t = sum_i p_ti v_i``, p softmax over visible i of ``(|t-i|-1) w + k_i`` (i = t: ``u + k_t``)."""
    time_decay, u, k, v = (x.double() for x in (time_decay, u, k, v))
    length = k.shape[1]
    t = torch.arange(length)
    distance = t[:, None] - t
    exponent = (distance.abs() - 1)[None, ..., None] * -time_decay.exp() + k[:, None]  # (B, query, key, C)
    exponent = torch.where((distance == 0)[None, ..., None], u + k[:, None], exponent)
    seen = torch.ones_like(distance, dtype=torch.bool) if bidirectional else distance >= 0
    seen = seen[None, ..., None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, :, None]
    exponent = exponent.masked_fill(~seen, -torch.inf)
    weights = torch.exp(exponent - exponent.logsumexp(2, keepdim=True).clamp_min(-1e300))
    return torch.einsum("btic,bic->btc", weights.nan_to_num(0), v)
