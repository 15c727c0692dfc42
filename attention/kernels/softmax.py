"""Exact softmax attention, ``softmax(q k^T / sqrt(E)) v`` (Vaswani et al. 2017, equation 1).

Shapes: B batch, H heads, L sequence length, E head width, q and k ``(B, H, L, E)``, v ``(B, H, L, Ev)``,
key_mask bool ``(B, L)`` with True = real token.
"""

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.kernels import dispatch
from attention.kernels.inputs import (
    EMULATES_HALF,
    accumulation_dtype,
    check_qkv,
    hidden_pairs,
    still_alone,
    zero_hidden,
)
from attention.kernels.softmax_varlen import grouped_flash, varlen, varlen_missing, varlen_refuses

OP = "softmax_attention"


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    causal: bool = False,
    skip_masked_queries: bool = False,
    kernel: str = "auto",
) -> torch.Tensor:
    """Softmax attention: ``(B, H, L, Ev)``; a query that sees no key gives zeros and gets zero gradients.

    A query at a masked position sees the visible keys like any other. With ``skip_masked_queries`` it gives zeros
    and gets zero gradients instead: self-attention needs no more, and padding then costs (almost) nothing.
    """
    check_qkv(q, k, v, key_mask, OP)
    q, k = still_alone(q, k, key_mask)
    skip = skip_masked_queries and key_mask is not None
    return dispatch.call(OP, kernel, q.device, q, k, v, key_mask=key_mask, causal=causal, skip_masked_queries=skip)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None,
    causal: bool,
    skip_masked_queries: bool,
) -> torch.Tensor:
    """The L x L weights, materialised, in fp32 at least."""
    dtype = accumulation_dtype(q.dtype)
    if key_mask is not None:
        k, v = zero_hidden(k, v, key_mask)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, L, L)
    hidden = hidden_pairs(key_mask, causal, q.shape[2], q.device)
    if hidden is not None:
        # the lowest finite value, not -inf: a row without any key stays free of NaN, and is zeroed below
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    out = (weights @ v.to(dtype)).to(v.dtype)
    return _zero_queries(out, key_mask) if skip_masked_queries else out


def _zero_queries(out: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    return out.masked_fill(~key_mask[:, None, :, None], 0.0)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None,
    causal: bool,
    skip_masked_queries: bool,
) -> torch.Tensor:
    """SDPA pinned to FlashAttention: O(L) memory. Padding is taken out first where that saves time.

    A CPU without arithmetic in bf16 and fp16 computes in fp32, 3 to 6 times as fast as torch emulates them.
    """
    if EMULATES_HALF and q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16):
        options = {"key_mask": key_mask, "causal": causal, "skip_masked_queries": skip_masked_queries}
        return _flash(q.float(), k.float(), v.float(), **options).to(v.dtype)
    if key_mask is None or key_mask.all():
        return _pinned(SDPBackend.FLASH_ATTENTION, q, k, v, None, causal)
    if q.shape[-1] == v.shape[-1]:
        padded = (_pad_width(x, q.shape[-1]) for x in (q, k, v))
        out = grouped_flash(*padded, key_mask, causal=causal, skip=skip_masked_queries)
        if out is not None:
            return out
    out = _masked_flash(q, k, v, key_mask, causal)
    return _zero_queries(out, key_mask) if skip_masked_queries else out


def _masked_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor, causal: bool
) -> torch.Tensor:
    """One call for the whole batch.

    The mask stays in its broadcast form ``(B, 1, 1, L)``; expanded to L x L it would cost what flash saves.
    The CPU kernel applies mask and ``is_causal`` together; a row that sees no key gives zeros.
    """
    k, v = zero_hidden(k, v, key_mask)
    return _pinned(SDPBackend.FLASH_ATTENTION, q, k, v, key_mask[:, None, None, :], causal)


def _flash_refuses(q: torch.Tensor, *_: object, key_mask: torch.Tensor | None, **__: object) -> str | None:
    if q.device.type != "cuda":
        return None
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention on CUDA takes fp16 and bf16, not {q.dtype}; use trainer.precision=bf16"
    if key_mask is not None:
        return "FlashAttention on CUDA takes no padding mask; use kernel=varlen"
    return None


def _efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None,
    causal: bool,
    skip_masked_queries: bool,
) -> torch.Tensor:
    """SDPA pinned to the memory-efficient CUDA kernel, which takes a mask or ``is_causal``, not both."""
    if key_mask is None:
        return _pinned(SDPBackend.EFFICIENT_ATTENTION, q, k, v, None, causal)
    k, v = zero_hidden(k, v, key_mask)
    visible = ~hidden_pairs(key_mask, causal, q.shape[2], q.device)  # (B, 1, 1 or L, L)
    # a row without any key sees all of them (k, v are zero there or real) and is then zeroed: whatever the
    # kernel makes of an empty row, neither its output nor its gradient can be NaN
    sees_any = visible.any(-1, keepdim=True)
    mask = (visible | ~sees_any).expand(q.shape[0], q.shape[1], q.shape[2], q.shape[2])
    out = _pinned(SDPBackend.EFFICIENT_ATTENTION, q, k, v, mask, causal=False)
    out = out.masked_fill(~sees_any, 0.0)
    return _zero_queries(out, key_mask) if skip_masked_queries else out


def _pinned(
    backend: SDPBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """SDPA that runs ``backend`` or raises ``ValueError``.

    Unpinned, SDPA leaves for the L x L form without a word when the head widths of q and v differ or a last
    dimension is not contiguous. Zero columns change neither scores nor the kept outputs, so widths are
    padded, and the scale is given because it belongs to the width before padding.
    """
    head_width, value_width = q.shape[-1], v.shape[-1]
    width = max(head_width, value_width)
    q, k, v = (_pad_width(x, width) for x in (q, k, v))
    try:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=head_width**-0.5
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise ValueError(
            f"{OP}: {backend.name} cannot run {q.dtype} {tuple(q.shape)} on {q.device.type}; "
            "use attention.kernel=reference"
        ) from error
    return out[..., :value_width]


def _pad_width(x: torch.Tensor, width: int) -> torch.Tensor:
    x = functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
    return x if x.stride(-1) == 1 else x.contiguous()


dispatch.register(
    OP,
    [
        dispatch.Kernel("flash", _flash, refuses=_flash_refuses),
        dispatch.Kernel("varlen", varlen, devices=("cuda",), missing=varlen_missing, refuses=varlen_refuses),
        dispatch.Kernel("efficient", _efficient, devices=("cuda",)),
        dispatch.Kernel("reference", _reference),
    ],
)
