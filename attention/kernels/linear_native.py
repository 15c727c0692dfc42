"""Linear attention in C++ for the CPU: ``csrc/linear.cpp``, formula in ``attention.kernels.linear``.

Shapes: B batch, H heads, L sequence length, E head width, q and k ``(B, H, L, E)``, v ``(B, H, L, Ev)``, key_mask
bool ``(B, L)``.

One pass over the keys for the state, one over the queries for the output, or one over both when causal; features live
in tiles of 48 positions, in fp32. Kept for the backward pass: the inputs, ``1 / denominator`` ``(B, H, L)`` and a state
a head, when causal one every 48 positions. Hidden keys and values are skipped, so they need no zeroing.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from attention.kernels.inputs import last_contiguous, native_refuses


def native(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """The "cpp" kernel of ``linear_attention``."""
    mask = None if key_mask is None else key_mask.contiguous()
    return _Native.apply(*last_contiguous(q, k, v), mask, causal)


def refuses(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None, causal: bool
) -> str | None:
    """Why this kernel cannot take these arguments, or None."""
    return native_refuses(v)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        op = torch.ops.lra_linear.causal_forward if causal else torch.ops.lra_linear.forward
        out, *sums = op(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, *sums)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op = torch.ops.lra_linear.causal_backward if ctx.causal else torch.ops.lra_linear.backward
        (grad,) = last_contiguous(grad)
        return *op(grad, *ctx.saved_tensors), None, None
