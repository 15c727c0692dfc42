"""The selective scan in C++ for the CPU, ``csrc/selective_scan.cpp``, with its gradient.

Shapes: B batch, L sequence length, D channels, N states.

The state is kept every few steps and recomputed between in the backward pass. All sums are fp32 whatever the
input's dtype, in an order that does not depend on the number of threads.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.kernels import native


def missing() -> str | None:
    """Why the kernel cannot run here, or None."""
    return native.missing("selective_scan")


def refuses(u: Tensor, *tensors: Tensor, **options: Tensor | None) -> str | None:
    """Why it does not take these arguments, or None."""
    return "it computes in fp32 and u is fp64; use attention.kernel=torch" if u.dtype == torch.float64 else None


def selective_scan_native(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    *,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As ``attention.kernels.selective_scan``."""
    zero = u.new_zeros(u.shape[2], dtype=torch.float32)
    if state is None:
        state = u.new_zeros(u.shape[0], *A.shape, dtype=torch.float32)
    inputs = (u, delta, A, B, C, zero if D is None else D, z, zero if delta_bias is None else delta_bias, state)
    y, end = _Scan.apply(*(x if x is None else x.float().contiguous() for x in inputs))
    return y.to(u.dtype), end


class _Scan(torch.autograd.Function):
    """``(u, delta, A, B, C, D, z, delta_bias, state) -> (y, end state)``, all fp32 and contiguous."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        y, end, kept = torch.ops.lra_selective_scan.forward(*inputs, any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs[:-1], kept)
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_y: Tensor, grad_end: Tensor) -> tuple:
        grads = torch.ops.lra_selective_scan.backward(*ctx.saved_tensors, grad_y.contiguous(), grad_end.contiguous())
        has_z = ctx.needs_input_grad[6]
        return *grads[:6], grads[6] if has_z else None, *grads[7:]
