"""FAVOR+ in C++ for the CPU: ``csrc/favor.cpp``, formulas in ``attention.kernels.favor``.

Shapes: B batch, H heads, L sequence length, E head width, M rows of the projection, F features; q and k
``(B, H, L, E)``, v ``(B, H, L, Ev)``, projection ``(M, E)``, key_mask bool ``(B, L)``.

The features of 48 positions at a time live in the cache, in fp32 whatever q, k, v are. Kept for the backward pass:
the inputs, ``1 / denominator`` ``(B, H, L)`` and a state of F (Ev + 2) numbers a head, when causal one every 48
positions. Hidden keys and values are skipped, so they need no zeroing.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from attention.kernels.inputs import last_contiguous, native_refuses


def native(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projection: torch.Tensor,
    *,
    features: str,
    key_mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """The "cpp" kernel of ``favor_attention``."""
    rows = projection.float()
    if features == "hyperbolic":
        rows = torch.cat([rows, -rows])
    mask = None if key_mask is None else key_mask.contiguous()
    return _Native.apply(*last_contiguous(q, k, v), rows.contiguous(), mask, causal)


def refuses(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projection: torch.Tensor,
    *,
    features: str,
    key_mask: torch.Tensor | None,
    causal: bool,
) -> str | None:
    """Why this kernel cannot take these arguments, or None."""
    if features == "trig":
        return "it has no trig features; use attention.features=positive or attention.kernel=torch"
    return native_refuses(v)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        op = torch.ops.lra_favor.causal_forward if causal else torch.ops.lra_favor.forward
        out, *sums = op(q, k, v, rows, mask)
        ctx.save_for_backward(q, k, v, rows, mask, *sums)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op = torch.ops.lra_favor.causal_backward if ctx.causal else torch.ops.lra_favor.backward
        (grad,) = last_contiguous(grad)
        return *op(grad, *ctx.saved_tensors), None, None, None
