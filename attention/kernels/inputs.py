"""What every attention kernel does to its inputs before the arithmetic.

Shapes: B batch, H heads, L sequence length, E head width, q and k ``(B, H, L, E)``, v ``(B, H, L, Ev)``.
"""

import torch
from torch.autograd.function import FunctionCtx

EMULATES_HALF = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""Whether this CPU lacks arithmetic in bf16 and fp16: torch then emulates it, at about 1 % of the fp32 speed."""


def check_tensors(op: str, **named: torch.Tensor | None) -> None:
    """Raise ``ValueError`` unless all are floating point tensors, ``key_mask`` apart, on one device."""
    first, device = None, None
    for name, x in named.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{op}: {name} must be a tensor; got {type(x).__name__}; give torch.as_tensor(...)")
        if name != "key_mask" and not x.is_floating_point():
            raise ValueError(f"{op}: {name} must be of a floating point dtype; got {x.dtype}; give {name}.float()")
        if first is None:
            first, device = name, x.device
        elif x.device != device:
            raise ValueError(
                f"{op}: all tensors must be on one device; {first} is on {device}, {name} on {x.device}; "
                f"give {name}.to({first}.device)"
            )


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, op: str) -> None:
    """Raise ``ValueError`` unless q, k, v ``(B, H, L, E)`` and the bool key mask ``(B, L)`` fit together."""
    check_tensors(op, q=q, k=k, v=v, key_mask=key_mask)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"{op}: q, k, v must be (B, H, L, E); got {q.dim()}, {k.dim()} and {v.dim()} dimensions; "
            f"split the width into heads, x.unflatten(-1, (H, E)).transpose(1, 2)"
        )
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{op}: q and k must have one shape (B, H, L, E) and v the same B, H, L; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expand what is shared between heads"
        )
    if not (q.shape[2] and q.shape[3] and v.shape[3]):
        raise ValueError(
            f"{op}: q, k, v must have L > 0, E > 0 and Ev > 0; got q {tuple(q.shape)}, v {tuple(v.shape)}; "
            "leave out calls without a token"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k, v must share a dtype; got {q.dtype}, {k.dtype}, {v.dtype}; convert with .to()")
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool or key_mask.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"{op}: key_mask must be bool {(q.shape[0], q.shape[2])} with True = real token; "
            f"got {key_mask.dtype} {tuple(key_mask.shape)}; 0 and 1 become such a mask with .bool()"
        )


def zero_hidden(k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero k and v where ``key_mask`` is False.

    A zero weight is not enough: 0 * NaN = NaN and 0 * inf = NaN, so what padding holds must be gone before
    any product. ``masked_fill`` also returns exact zeros as the gradient of what it overwrote.
    """
    hidden = ~key_mask[:, None, :, None]
    return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


class _Still(torch.autograd.Function):
    """Identity whose gradient is zero where ``key_mask (B, L)`` shows a single key, or everywhere without a mask."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(key_mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (key_mask,) = ctx.saved_tensors
        if key_mask is None:
            return torch.zeros_like(grad), None
        single = key_mask.sum(-1) == 1
        # a look at the mask saves a copy; on CUDA it would stall the stream
        if grad.device.type == "cpu" and not single.any():
            return grad, None
        return grad.masked_fill(single[:, None, None, None], 0.0), None


def still_alone(q: torch.Tensor, k: torch.Tensor, key_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, to which no gradient comes back from a row of the batch that shows one key.

    A weighted mean of one value is that value whatever q and k are. What kernels give there is the difference of two
    equal products, rounded: up to 4e-5 in fp32.
    """
    if q.shape[2] > 1 and key_mask is None:
        return q, k
    return tuple(_Still.apply(x, key_mask if x.shape[2] > 1 else None) if x.requires_grad else x for x in (q, k))


def hidden_pairs(key_mask: torch.Tensor | None, causal: bool, length: int, device: torch.device) -> torch.Tensor | None:
    """True where query i must not see key j, broadcasts to ``(B, H, L, L)``; None if it sees all."""
    hidden = None if key_mask is None else ~key_mask[:, None, None, :]
    if causal:
        future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        hidden = future if hidden is None else hidden | future
    return hidden


def finite_max(x: torch.Tensor) -> torch.Tensor:
    """Maximum of a row, constant for the gradient as it cancels; finite even if all x are -inf."""
    return x.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of exponents and sums: at least fp32, because bf16 exponents alone cost 4 % of the output."""
    return torch.promote_types(dtype, torch.float32)


def native_refuses(v: torch.Tensor) -> str | None:
    """Why the C++ kernels, which sum in fp32, cannot take tensors like ``v``; None when they can."""
    if v.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes in fp32 and would lose digits of {v.dtype}; use attention.kernel=torch"
    return None


def last_contiguous(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, copied where the last dimension is not contiguous; other strides are free."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
