"""The WKV-4 op: a decaying average of v with weights e^k, as a recurrence of constant state.

Shapes: B batch, L sequence length, C channels.

RWKV-4 (Peng et al. 2023, eq. 14), with w = -exp(time_decay) < 0 and u the bonus of the current token:

    y_t = (sum_{i<t} e^{(t-1-i)w + k_i} v_i + e^{u + k_t} v_t) / (the same without v)

The bidirectional form (Bi-WKV, Duan et al. 2024, eq. 3, without its division of w and u by L) weighs every
i != t by e^{(|t-i|-1)w + k_i}. To add a kernel, put it into the list at the end of this file.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention.kernels import dispatch, wkv4_native, wkv4_triton
from attention.kernels.inputs import check_tensors
from attention.kernels.wkv4_scan import NEVER, State, wkv4_scan


def wkv4(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    state: State | None = None,
    bidirectional: bool = False,
    reverse: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, State | None]:
    """WKV-4: ``time_decay, u (C)``, ``k, v (B, L, C)`` -> ``y (B, L, C)`` and the end state.

    A state is ``(num, den, max)``, each ``(B, C)`` in fp32 (fp64 for fp64 input). The true sums are
    ``num e^max`` and ``den e^max``; which ``max`` is taken is the kernel's choice. ``state`` starts the scan
    where an earlier call ended; gradients flow through ``num`` and ``den`` on both ends, ``max`` counts as a
    constant. A bidirectional call takes no state (``ValueError``) and returns None for it.

    ``reverse`` scans from the last position to the first: sums over i > t instead of i < t, and the end state is
    the one before the first position.

    A position that is False in ``key_mask (B, L)`` adds nothing, whatever it holds, while the state still
    decays. A query that sees no key gives zeros. No gradient comes back from a masked query.
    """
    _check(time_decay, u, k, v, key_mask, state, bidirectional)
    options = {"key_mask": key_mask, "state": state, "bidirectional": bidirectional, "reverse": reverse}
    return dispatch.call("wkv4", kernel, k.device, time_decay, u, k, v, **options)


def initial_state(batch_size: int, channels: int, *, device: torch.device, dtype: torch.dtype) -> State:
    """The state before the first token, three ``(B, C)`` tensors in ``dtype``, or fp32 if that is less."""
    zero = torch.zeros(batch_size, channels, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return zero, zero, torch.full_like(zero, NEVER)


def wkv4_step(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
    """One token: ``k, v (B, C)``, ``w, u (C)``, w = -exp(time_decay) -> ``y (B, C)`` and the next state."""
    return _read(u + k, v, [state]), _add(w, k, v, state)


def _add(w: Tensor, k: Tensor, v: Tensor, state: State) -> State:
    """The state one step later: decayed by e^w, with ``e^k (v, 1)`` added."""
    num, den, peak = state
    # an integer scale: differences of two are exact, so that no rounding piles up in it over a long sequence; of what
    # the sums hold, not of the last scale: rounded up at every step, that one would never come down with them
    held = peak + den.detach().log()
    scale = torch.maximum(held + w, k).detach().clamp_min(NEVER).ceil()
    past, now = (peak - scale + w).exp(), (k - scale).exp()
    return past * num + now * v, past * den + now, scale


def _read(k: Tensor, v: Tensor, states: list[State]) -> Tensor:
    """Weighted mean of v with weight e^k and of all that the states hold; zeros where the weights are."""
    scale = k
    for _, _, peak in states:
        scale = torch.maximum(scale, peak)
    scale = scale.detach()
    own = (k - scale).exp()
    num, den = own * v, own
    for past_num, past_den, peak in states:
        past = (peak - scale).exp()
        num, den = num + past * past_num, den + past * past_den
    return num / den.masked_fill(den == 0, 1)


def _plain(scan: Callable) -> Callable:
    """A kernel from a scan in plain torch, which knows no ``reverse`` and takes masked keys as -inf, their v as 0."""

    def run(
        time_decay: Tensor,
        u: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None,
        reverse: bool,
        **options: object,
    ) -> tuple[Tensor, State | None]:
        if key_mask is not None:
            hidden = ~key_mask[..., None]
            k, v = k.masked_fill(hidden, -torch.inf), v.masked_fill(hidden, 0)
        if not reverse:
            return scan(time_decay, u, k, v, key_mask=key_mask, **options)
        key_mask = None if key_mask is None else key_mask.flip(1)
        y, state = scan(time_decay, u, k.flip(1), v.flip(1), key_mask=key_mask, **options)
        return y.flip(1), state

    return run


def _reference(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    state: State | None,
    bidirectional: bool,
) -> tuple[Tensor, State | None]:
    """Token by token, gradients by autograd. Masked keys are -inf already."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    w, bonus = -time_decay.to(dtype).exp(), u.to(dtype)
    # unbind: indexing k[:, t] in the loop would make the backward quadratic
    keys, values = k.to(dtype).unbind(1), v.to(dtype).unbind(1)
    empty = initial_state(k.shape[0], k.shape[2], device=k.device, dtype=dtype)

    def states(start: State, order: range) -> dict[int, State]:
        """The state that each position finds, and under -1 the one after the last."""
        found = {}
        for t in order:
            found[t] = start
            start = _add(w, keys[t], values[t], start)
        return found | {-1: start}

    order = range(len(keys))
    scans = [states(state or empty, order)]
    if bidirectional:
        scans.append(states(empty, order[::-1]))
    y = torch.stack([_read(bonus + keys[t], values[t], [scan[t] for scan in scans]) for t in order], 1)
    if key_mask is not None:
        y = torch.where(key_mask[..., None], y, y.detach())
    return y.to(k.dtype), None if bidirectional else scans[0][-1]


def _torch(time_decay: Tensor, u: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, State | None]:
    """The two-level scan, in a wider dtype where keys differ too much for the narrow one."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    for sums in dict.fromkeys((dtype, torch.float64)):
        result = wkv4_scan(time_decay, u, k, v, dtype=sums, **options)
        if result is not None:
            y, state = result
            return y, state and tuple(part.to(dtype) for part in state)
    # keys more than 600 apart: only a scale of every step's own holds them
    return _reference(time_decay, u, k, v, **options)


def _check(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State | None,
    bidirectional: bool,
) -> None:
    check_tensors("wkv4", k=k, v=v, time_decay=time_decay, u=u, key_mask=key_mask)
    if k.dim() != 3 or k.shape != v.shape or 0 in k.shape[1:]:
        raise ValueError(
            f"wkv4: k and v must be of one shape (B, L, C) with L, C > 0; got {_shapes(k, v)}; heads are flattened "
            "into C, and there is no call without a token"
        )
    if k.dtype != v.dtype:
        raise ValueError(f"wkv4: k and v must share a dtype; got {k.dtype} and {v.dtype}; convert one with .to()")
    batch, length, channels = k.shape
    if time_decay.shape != (channels,) or u.shape != (channels,):
        raise ValueError(
            f"wkv4: time_decay and u must be of shape ({channels},), a number a channel of k; "
            f"got {_shapes(time_decay, u)}; expand what channels share"
        )
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (batch, length)):
        raise ValueError(
            f"wkv4: key_mask must be bool of shape ({batch}, {length}), True = real token; "
            f"got {key_mask.dtype} {_shapes(key_mask)}; 0 and 1 become such a mask with .bool()"
        )
    if state is None:
        return
    if bidirectional:
        raise ValueError("wkv4: a bidirectional call sees the whole sequence and takes no state; use state=None")
    if not isinstance(state, tuple | list) or len(state) != 3:
        raise ValueError(f"wkv4: state must be three tensors (num, den, max); got {state!r:.60}; see initial_state")
    check_tensors("wkv4", k=k, **dict(zip(("num", "den", "max"), state)))
    if any(part.shape != (batch, channels) for part in state):
        raise ValueError(
            f"wkv4: state must be three tensors of shape ({batch}, {channels}); got {_shapes(*state)}; "
            "take it from a call with the same batch"
        )


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


dispatch.register(
    "wkv4",
    [
        replace(wkv4_triton.KERNEL, run=_plain(wkv4_triton.KERNEL.run)),
        dispatch.Kernel("cpp", wkv4_native.run, ("cpu",), missing=wkv4_native.missing, refuses=wkv4_native.refuses),
        dispatch.Kernel("torch", _plain(_torch)),
        dispatch.Kernel("reference", _plain(_reference)),
    ],
)
