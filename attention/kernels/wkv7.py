"""The WKV-7 op: a matrix state a head, decayed, corrected along one direction and added to at every step.

Shapes: B batch, L sequence length, H heads, K key width, V value width.

RWKV-7 (Peng et al. 2025, "RWKV-7 Goose with expressive dynamic state evolution", arXiv 2503.14456), S ``(V, K)``:

    S_t = S_{t-1} diag(e^{logw_t}) + (S_{t-1} a_t) b_t^T + v_t k_t^T,   y_t = S_t r_t

with logw <= 0. The model takes a = -kappa and b = kappa * rate, |kappa| = 1; the op takes any a and b, but state
and outputs grow without bound where ``diag(e^logw) + a b^T`` stretches. There is no scale 1 / sqrt(K).
To add a kernel, put it into the list at the end of this file.
"""

from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.kernels import dispatch, native
from attention.kernels.inputs import check_tensors
from attention.kernels.wkv7_chunked import wkv7_chunked


def wkv7(
    r: Tensor,
    logw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    state: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """WKV-7: ``r, logw, k, a, b (B, L, H, K)``, ``v (B, L, H, V)`` -> ``y (B, L, H, V)`` and the end state.

    ``logw`` is the logarithm of the decay, so never positive; on the CPU a positive one raises ``ValueError``
    (on CUDA the check would stall the stream). ``state (B, H, V, K)`` starts the scan where an earlier call
    ended, zeros without it. States are fp32 (fp64 for fp64 input) and gradients flow through both ends.

    A step with logw = 0 and k = a = 0 leaves the state as it is: so a position is masked.
    """
    _check(r, logw, k, v, a, b, state)
    return dispatch.call("wkv7", kernel, r.device, r, logw, k, v, a, b, state=state)


def initial_state(
    batch_size: int, heads: int, value_width: int, key_width: int, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The state before the first token, zeros ``(B, H, V, K)`` in ``dtype``, or fp32 if that is less."""
    sums = torch.promote_types(dtype, torch.float32)
    return torch.zeros(batch_size, heads, value_width, key_width, device=device, dtype=sums)


def wkv7_step(
    r: Tensor, logw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: ``r, logw, k, a, b (B, H, K)``, ``v (B, H, V)`` -> ``y (B, H, V)`` and the next state."""
    r, logw, k, v, a, b = (x.to(state.dtype) for x in (r, logw, k, v, a, b))
    seen = state @ a[..., None]
    state = state * logw.exp()[..., None, :] + seen * b[..., None, :] + v[..., None] * k[..., None, :]
    return (state @ r[..., None]).squeeze(-1), state


def _wide(inputs: tuple[Tensor, ...], state: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Inputs and start state in the dtype of the sums."""
    dtype = torch.float32
    for x in inputs:
        dtype = torch.promote_types(dtype, x.dtype)
    if state is None:
        batch, _, heads, key_width = inputs[0].shape
        value_width = inputs[3].shape[-1]
        state = initial_state(batch, heads, value_width, key_width, device=inputs[0].device, dtype=dtype)
    return [x.to(dtype) for x in inputs], state.to(dtype)


def _reference(*inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token, gradients by autograd."""
    wide, state = _wide(inputs, state)
    outputs = []
    # unbind: indexing [:, t] in the loop would make the backward quadratic
    for step in zip(*(x.unbind(1) for x in wide)):
        y, state = wkv7_step(*step, state)
        outputs.append(y)
    return torch.stack(outputs, 1).to(inputs[3].dtype), state


def _torch(*inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Matrix products in chunks."""
    wide, state = _wide(inputs, state)
    y, state = wkv7_chunked(*wide, state)
    return y.to(inputs[3].dtype), state


def _cpp(*inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Step by step in C++."""
    wide, state = _wide(inputs, state)
    y, state = _Native.apply(*wide, state)
    return y.to(inputs[3].dtype), state


class _Native(torch.autograd.Function):
    """``(r, logw, k, v, a, b, state) -> (y, state)`` by ``csrc/wkv7.cpp``, which wants plain memory and e^logw."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *args: Tensor) -> tuple[Tensor, Tensor]:
        r, logw, k, v, a, b, state = (x.contiguous() for x in args)
        inputs = (r, logw.exp(), k, v, a, b)
        y, end, *kept = torch.ops.lra_wkv7.forward(*inputs, state, any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, *kept)
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.lra_wkv7.backward(*ctx.saved_tensors, *(grad.contiguous() for grad in grads))


def _fla(*inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The Triton kernels of flash-linear-attention; their state is ``(B, H, K, V)``."""
    from fla.ops.rwkv7 import chunk_rwkv7

    _, state = _wide(inputs, state)
    r, logw, k, v, a, b = inputs
    dtype = v.dtype
    r, k, a, b = (x.to(dtype) for x in (r, k, a, b))
    options = {"scale": 1.0, "initial_state": state.mT.contiguous(), "output_final_state": True}
    y, end = chunk_rwkv7(r, logw.float(), k, v, a, b, **options)
    return y, end.mT


def _fla_missing() -> str | None:
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed; pip install fla-core"
    return None


def _fla_refuses(*inputs: Tensor, state: Tensor | None) -> str | None:
    v = inputs[3]
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, not {v.dtype}; use autocast"
    if min(v.shape[-1], inputs[0].shape[-1]) < 16:
        return "its tensor-core products need heads of width 16 or more; use fewer heads"
    return None


def _check(r: Tensor, logw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None) -> None:
    named = {"logw": logw, "k": k, "a": a, "b": b}
    check_tensors("wkv7", r=r, **named, v=v, state=state)
    if r.dim() != 4 or 0 in r.shape[1:]:
        raise ValueError(
            f"wkv7: r must be (B, L, H, K) with L, H, K > 0; got {tuple(r.shape)}; split the width into heads, and "
            "leave out calls without a token"
        )
    for name, x in named.items():
        if x.shape != r.shape:
            raise ValueError(
                f"wkv7: {name} must have the shape of r, {tuple(r.shape)}; got {tuple(x.shape)}; none is broadcast"
            )
    if v.dim() != 4 or v.shape[:3] != r.shape[:3] or not v.shape[3]:
        raise ValueError(
            f"wkv7: v must be {(*r.shape[:3], 'V')} with V > 0 beside this r; got {tuple(v.shape)}; give it the rows, "
            "tokens and heads of r"
        )
    want = (r.shape[0], r.shape[2], v.shape[3], r.shape[3])
    if state is not None and state.shape != want:
        raise ValueError(
            f"wkv7: state must be (B, H, V, K) = {want}; got {tuple(state.shape)}; take it from a call with the same "
            "batch, or from initial_state"
        )
    if logw.device.type == "cpu" and (logw > 0).any():
        raise ValueError(
            f"wkv7: logw is the logarithm of a decay, never positive; got {logw.max():.3g}; "
            f"pass log(w), or -exp(x) for a free x"
        )


dispatch.register(
    "wkv7",
    [
        dispatch.Kernel("fla", _fla, devices=("cuda",), missing=_fla_missing, refuses=_fla_refuses),
        dispatch.Kernel("cpp", _cpp, devices=("cpu",), missing=partial(native.missing, "wkv7")),
        dispatch.Kernel("torch", _torch),
        dispatch.Kernel("reference", _reference),
    ],
)
