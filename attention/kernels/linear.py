"""Linear attention with ``phi(x) = elu(x) + 1`` (Katharopoulos et al. 2020, equations 5, 7 and 9).

Shapes: B batch, H heads, L sequence length, E head width, q and k ``(B, H, L, E)``, v ``(B, H, L, Ev)``,
T chunk length, C = ceil(L / T) chunks, key_mask bool ``(B, L)`` with True = real token.

    out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)         j over visible keys
"""

from functools import partial

import torch
from torch.nn import functional

from attention.kernels import dispatch, linear_native, native
from attention.kernels.inputs import (
    accumulation_dtype,
    check_qkv,
    finite_max,
    hidden_pairs,
    still_alone,
    zero_hidden,
)

OP = "linear_attention"
CHUNK = 64
"""T of the causal form: per token it holds T scores and E Ev / T numbers of state, equal near T = E."""


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    causal: bool = False,
    kernel: str = "auto",
) -> torch.Tensor:
    """Linear attention: ``(B, H, L, Ev)``; a query that sees no key gives zeros and gets zero gradients."""
    check_qkv(q, k, v, key_mask, OP)
    q, k = still_alone(q, k, key_mask)
    return dispatch.call(OP, kernel, q.device, q, k, v, key_mask=key_mask, causal=causal)


def initial_state(like: torch.Tensor, batch: int, heads: int, width: int) -> torch.Tensor:
    """State ``(B, H, E, E + 1)`` of a stream before its first token, on the device of ``like``, at least fp32."""
    return like.new_zeros(batch, heads, width, width + 1, dtype=accumulation_dtype(like.dtype))


def linear_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the causal form: ``q, k, v (B, H, E)`` -> ``(B, H, E)`` and the next state.

    The state has no scale: while all keys so far are below -87 in fp32, there is none yet and the output is zero.
    """
    phi_q, phi_k = _phi(q.to(state.dtype)), _phi(k.to(state.dtype))
    values = functional.pad(v.to(state.dtype), (0, 1), value=1.0)
    state = state + phi_k[..., None] * values[..., None, :]
    return _divide((phi_q[..., None, :] @ state).squeeze(-2)).to(v.dtype), state


def _phi(x: torch.Tensor, top: torch.Tensor | float = 0.0) -> torch.Tensor:
    """``elu(x) + 1`` as ``exp(min(x, 0)) + max(x, 0)``: elu rounds e^x - 1 to -1 below x = -17.

    Times ``e^-top``, for x at most ``top`` or for top = 0.
    """
    return (x - top).clamp(max=0.0).exp() + x.relu()


def _top(x: torch.Tensor, dims: tuple[int, ...] = (-1,)) -> torch.Tensor:
    """Logarithm of a factor that features may be rid of where it cancels: ``min(max x, 0)``, a constant."""
    return x.detach().amax(dims, keepdim=True).clamp(max=0.0)


def _divide(sums: torch.Tensor) -> torch.Tensor:
    """Numerator over denominator, the last column; zeros where no key was visible.

    And where no product of features is a normal number: the reciprocal is infinite there, its gradient NaN.
    """
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    empty = denominator < torch.finfo(sums.dtype).tiny
    return (numerator / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def _wide(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in the dtype of the sums, zeros where hidden; the last column of v, ones, sums to the denominator."""
    if key_mask is not None:
        k, v = zero_hidden(k, v, key_mask)
    dtype = accumulation_dtype(q.dtype)
    return q.to(dtype), k.to(dtype), functional.pad(v.to(dtype), (0, 1), value=1.0)


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """The L x L weights, materialised; each row relative to the largest key that it sees."""
    queries, keys, values = _wide(q, k, v, key_mask)
    size = _top(keys)
    weights = _phi(queries, _top(queries)) @ _phi(keys, size).transpose(-1, -2)
    hidden = hidden_pairs(key_mask, causal, q.shape[2], q.device)
    sizes = size.transpose(-1, -2).expand_as(weights)
    if hidden is not None:
        sizes = sizes.masked_fill(hidden, -torch.inf)
    return _divide(weights * (sizes - finite_max(sizes)).exp() @ values).to(v.dtype)


def _torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Keys and values first, ``phi(q) (phi(k)^T v)``: linear in L."""
    queries, keys, values = _wide(q, k, v, key_mask)
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]

    def sums(phi_q: torch.Tensor, phi_k: torch.Tensor) -> torch.Tensor:
        if hidden is not None:
            # phi(0) = 1, so a hidden key must leave the denominator here
            phi_k = phi_k.masked_fill(hidden, 0.0)
        return _prefix_sums(phi_q, phi_k, values) if causal else phi_q @ (phi_k.transpose(-1, -2) @ values)

    found = sums(_phi(queries), _phi(keys))
    if _underflows(found, key_mask, causal):
        if causal:
            return _reference(q, k, v, key_mask=key_mask, causal=True)
        top = _top(keys if hidden is None else keys.masked_fill(hidden, -torch.inf), (-2, -1))
        found = sums(_phi(queries, _top(queries)), _phi(keys, top))
    return _divide(found).to(v.dtype)


def _underflows(sums: torch.Tensor, key_mask: torch.Tensor | None, causal: bool) -> bool:
    """True if a query lost digits of its denominator; never on CUDA, where the look would stall the stream.

    What vanished is below the smallest number; a denominator above its square root cannot have missed it.
    """
    if sums.device.type == "cuda":
        return False
    lost = sums.detach()[..., -1] < torch.finfo(sums.dtype).tiny ** 0.5
    if key_mask is not None:
        seen = key_mask.cummax(1).values if causal else key_mask.any(1, keepdim=True)
        lost &= seen[:, None]
    return bool(lost.any())


def _prefix_sums(phi_q: torch.Tensor, phi_k: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``sum_{j <= i} phi(q_i).phi(k_j) values_j``, chunk by chunk."""
    length = phi_q.shape[2]
    phi_q, phi_k, values = (_chunks(x) for x in (phi_q, phi_k, values))
    state = phi_k.transpose(-1, -2) @ values  # (B, H, C, E, Ev + 1)
    # what a chunk carries in is the sum over earlier chunks only
    carried = functional.pad(state[:, :, :-1].cumsum(2), (0, 0, 0, 0, 1, 0))
    within = (phi_q @ phi_k.transpose(-1, -2)).tril()
    sums = phi_q @ carried + within @ values
    return sums.flatten(2, 3)[:, :, :length]


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """``(B, H, L, E) -> (B, H, C, T, E)``; zero rows fill the last chunk and add nothing to any sum."""
    chunk = min(CHUNK, x.shape[2])
    return functional.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


dispatch.register(
    OP,
    [
        dispatch.Kernel(
            "cpp", linear_native.native, ("cpu",), partial(native.missing, "linear"), linear_native.refuses
        ),
        dispatch.Kernel("torch", _torch),
        dispatch.Kernel("reference", _reference),
    ],
)
