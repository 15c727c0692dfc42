"""WKV-4 through the C++ kernel ``csrc/wkv4.cpp``, which has the formulas.

Shapes: B batch, L sequence length, C channels. The kernel reads and writes fp32: from an output that was rounded to
bf16 the gradients would be far off where keys are large, as they hold differences from it. Saved for the backward:
k, v, y, the reciprocal denominator, and one exponent a channel for every 16 positions.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.kernels import native
from attention.kernels.wkv4_scan import State

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def missing() -> str | None:
    """Why the kernel cannot run on this machine, or None."""
    return native.missing("wkv4")


def refuses(time_decay: Tensor, u: Tensor, k: Tensor, v: Tensor, **_: object) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    return None if k.dtype in DTYPES else f"it takes fp32, bf16 or fp16 and k is {k.dtype}; use attention.kernel=torch"


def run(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    state: State | None,
    reverse: bool,
    bidirectional: bool = False,
) -> tuple[Tensor, State | None]:
    """WKV-4; arguments and result as in ``attention.kernels.wkv4``."""
    dtype = k.dtype
    k, v = k.float(), v.float()
    if bidirectional:
        return _Both.apply(time_decay, u, k, v, key_mask).to(dtype), None
    num, den, peak = (None, None, None) if state is None else (part.float() for part in state)
    y, *end = _WKV4.apply(time_decay, u, k, v, num, den, peak, key_mask, reverse)
    return y.to(dtype), tuple(end)


class _WKV4(torch.autograd.Function):
    """``(time_decay, u, k, v, num, den, peak) -> (y, num, den, peak)``; no gradient for peak."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        time_decay: Tensor,
        u: Tensor,
        k: Tensor,
        v: Tensor,
        num: Tensor | None,
        den: Tensor | None,
        peak: Tensor | None,
        key_mask: Tensor | None,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = -time_decay.float().exp()
        tensors = [x if x is None else x.contiguous() for x in (w, u.float(), k, v, key_mask, num, den, peak)]
        save = any(ctx.needs_input_grad)
        y, end_num, end_den, end_peak, *saved = torch.ops.lra_wkv4.forward(*tensors, reverse, save)
        ctx.mark_non_differentiable(end_peak)
        ctx.set_materialize_grads(False)
        if save:
            ctx.save_for_backward(*tensors, y, end_peak, *saved)
            ctx.reverse, ctx.parameters = reverse, (time_decay.dtype, u.dtype)
        return y, end_num, end_den, end_peak

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_y: Tensor | None,
        grad_num: Tensor | None,
        grad_den: Tensor | None,
        _: None,
    ) -> tuple[Tensor | None, ...]:
        # once only: activation checkpointing refuses a second look
        kept = ctx.saved_tensors
        tensors, saved = kept[:8], kept[8:]
        y, end_peak = saved[:2]
        grads = [torch.zeros_like(y) if grad_y is None else grad_y.contiguous(), None, None]
        if grad_num is not None or grad_den is not None:
            grads[1:] = (torch.zeros_like(end_peak) if x is None else x.contiguous() for x in (grad_num, grad_den))
        grad_w, grad_u, *grads = torch.ops.lra_wkv4.backward(*tensors, ctx.reverse, *saved, *grads)
        w, num = tensors[0], tensors[5]
        if num is None:
            grads[2:] = None, None
        decay_dtype, bonus_dtype = ctx.parameters
        grad_decay = (grad_w.sum(0) * w).to(decay_dtype)
        return grad_decay, grad_u.sum(0).to(bonus_dtype), *grads, None, None, None


class _Both(torch.autograd.Function):
    """``(time_decay, u, k, v) -> y``, both directions at once."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        time_decay: Tensor,
        u: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
    ) -> Tensor:
        w = -time_decay.float().exp()
        tensors = [x if x is None else x.contiguous() for x in (w, u.float(), k, v, key_mask)]
        save = any(ctx.needs_input_grad)
        y, *saved = torch.ops.lra_wkv4.both_forward(*tensors, save)
        if save:
            ctx.save_for_backward(*tensors, y, *saved)
            ctx.parameters = time_decay.dtype, u.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # once only: activation checkpointing refuses a second look
        grads = torch.ops.lra_wkv4.both_backward(*kept, grad_y.contiguous())
        grad_w, grad_u, grad_k, grad_v = grads
        decay_dtype, bonus_dtype = ctx.parameters
        grad_decay = (grad_w.sum(0) * kept[0]).to(decay_dtype)
        return grad_decay, grad_u.sum(0).to(bonus_dtype), grad_k, grad_v, None
