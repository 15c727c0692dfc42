"""WKV-4 as a two-level scan in plain torch, with its gradient written out.

Shapes: B batch, L sequence length, C channels, T steps a chunk, N chunks (N * T >= L + 2).

RWKV-4 (Peng et al. 2023, eq. 14; Bi-WKV: Duan et al. 2024, eq. 3) averages v with the weights e^{k_i} decayed
by e^w a step. Numerator and denominator share one scale e^M a row and channel, M >= every exponent, so that
both are plain linear recurrences S <- e^w S + x. Such a recurrence runs over all chunks at once for T steps,
then over the N chunk totals, and a last pass adds what earlier chunks left: 2 sqrt(L) small steps, not L.

Its adjoint is the same recurrence in the other direction. With D the denominator, r = g / D, q = r y:

    R_i = sum_{t>i} e^{(t-1-i)w} r_t,  Q_i likewise of q,  A, B = numerator and denominator of the past
    gv_i = e^{k_i} (R_i + e^u r_i)               gu = sum_i e^{u+k_i} r_i (v_i - y_i)
    gk_i = e^{k_i} (v_i R_i - Q_i) + e^{u+k_i} r_i (v_i - y_i)      gw = e^w sum_i (R_i A_i - Q_i B_i)
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NEVER = -1e38
"""Exponent of a sum that holds nothing yet: finite, so that differences of two of them stay finite."""

State = tuple[Tensor, Tensor, Tensor]


def wkv4_scan(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    state: State | None,
    bidirectional: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, State | None] | None:
    """WKV-4 with sums in ``dtype``; None when keys differ by more than its exponent range, about 55 in fp32.

    Masked keys arrive as -inf with v = 0.
    Arguments and result otherwise as in ``attention.kernels.wkv4``.
    """
    with torch.no_grad():
        # rounding up makes M exact in any dtype and k - M too
        scale = (k.amax(1).to(dtype) + u.clamp_min(0)).clamp_min(NEVER)
        if state is not None:
            scale = torch.maximum(scale, state[2])
        scale = scale.ceil()
    w, u = -time_decay.to(dtype).exp(), u.to(dtype)
    start = scale.new_zeros(2, *scale.shape)
    if state is not None:
        start = torch.stack(state[:2]).to(dtype) * (state[2] - scale).exp()
    y, end, smallest = _Scan.apply(w, u, k, v, start, scale, key_mask, bidirectional)
    if smallest < _floor(dtype):
        return None
    if bidirectional:
        return y, None
    if _least(end[1]) < _floor(dtype):
        return y, _far_end(time_decay, k, v, state, dtype)
    return y, _rescale(end, scale)


def _least(x: Tensor) -> Tensor:
    return x.amin() if x.numel() else x.new_full((), torch.inf)


def _floor(dtype: torch.dtype) -> float:
    """Smallest trusted denominator: what underflows beside it is below the rounding error squared."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps**2


def _rescale(sums: Tensor, scale: Tensor) -> State:
    """End state with a denominator near 1, so that an old large key does not hold the scale up for ever."""
    num, den = sums.unbind()
    shift = den.detach().log().round()
    empty = den.detach() == 0
    shift = shift.masked_fill(empty, 0)
    factor = (-shift).exp()
    return num * factor, den * factor, (scale + shift).masked_fill(empty, NEVER)


def _far_end(time_decay: Tensor, k: Tensor, v: Tensor, state: State | None, dtype: torch.dtype) -> State:
    """The end state where it is out of the range of the outputs' scale: by its definition, on a scale of its own."""
    w = -time_decay.double().exp()
    age = torch.arange(k.shape[1] - 1, -1, -1, device=k.device)
    exponents = k.double() + age[:, None] * w
    peak = exponents.detach().amax(1)
    if state is not None:
        num, den, old = (part.double() for part in state)
        # what decayed: -inf where the state holds nothing, whatever its scale says
        old = torch.where(den.detach() > 0, old + k.shape[1] * w, -torch.inf)
        peak = torch.maximum(peak, old.detach())
    peak = peak.clamp_min(NEVER).ceil()
    weights = (exponents - peak[:, None]).exp()
    sums = [(weights * v).sum(1), weights.sum(1)]
    if state is not None:
        kept = (old - peak).exp()
        sums = [sums[0] + kept * num, sums[1] + kept * den]
    return sums[0].to(dtype), sums[1].to(dtype), peak.to(dtype)


def _steps(length: int) -> int:
    """Steps T a chunk, about the square root of L."""
    return 2 ** (length.bit_length() // 2)


def _buffer(length: int, steps: int, *, first: Tensor | float = 0, last: Tensor | float = 0, like: Tensor) -> Tensor:
    """Slots ``(2, B, N * T, C)``: ``first (2, B, C)``, L tokens yet to be filled, ``last``, zeros."""
    slots = -(-(length + 2) // steps) * steps
    x = like.new_empty(2, like.shape[0], slots, like.shape[-1])
    x[:, :, 0] = first
    x[:, :, length + 1] = last
    x[:, :, length + 2 :] = 0
    return x


def _decayed_sums(x: Tensor, w: Tensor, steps: int, *, reverse: bool = False) -> Tensor:
    """``S_t = x_t + e^w S_{t-1}`` (reverse: ``S_{t+1}``) along the slots of ``x (2, B, N * T, C)``."""
    x = x.unflatten(2, (-1, steps))
    out = torch.empty_like(x)
    pairs = list(zip(x.unbind(3), out.unbind(3)))
    order = range(x.shape[2])
    age = torch.arange(1, steps + 1, device=x.device, dtype=x.dtype)
    if reverse:
        pairs, order, age = pairs[::-1], order[::-1], age.flip(0)
    decay = w.exp()
    total = pairs[0][1].copy_(pairs[0][0])
    for x_t, out_t in pairs[1:]:
        total = torch.addcmul(x_t, total, decay, out=out_t)

    # e^{Tw} afresh, not by T products: the rounding of e^w would grow with L
    chunk_decay = (steps * w).exp()
    before = torch.zeros_like(total)
    totals, carries = total.unbind(2), before.unbind(2)
    for last, now in zip(order, order[1:]):
        torch.addcmul(totals[last], carries[last], chunk_decay, out=carries[now])
    out.addcmul_(before.unsqueeze(3), (age[:, None] * w).exp())
    return out.flatten(2, 3)


class _Scan(torch.autograd.Function):
    """``(w, u, k, v, start, scale) -> (y, end, smallest denominator)``; sums in the dtype of ``scale``."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        w: Tensor,
        u: Tensor,
        k: Tensor,
        v: Tensor,
        start: Tensor,
        scale: Tensor,
        key_mask: Tensor | None,
        bidirectional: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        length = k.shape[1]
        steps = _steps(length)
        x = _buffer(length, steps, first=start, like=scale)
        ekv, ek = x[:, :, 1 : length + 1]
        torch.sub(k, scale[:, None], out=ek).exp_()
        torch.mul(ek, v, out=ekv)
        sums = [_decayed_sums(x, w, steps)]
        end = sums[0][:, :, length].clone()
        past = sums[0][:, :, :length]
        seen = [past]
        if bidirectional:
            sums.append(_decayed_sums(x, w, steps, reverse=True))
            seen.append(sums[1][:, :, 2 : length + 2])
            past = past + seen[1]
        bonus = u.exp()
        den = torch.addcmul(past[1], ek, bonus)
        if key_mask is not None:
            # no gradient comes back from a masked query
            den.masked_fill_(~key_mask[..., None], torch.inf)
        smallest = _least(den)
        inverse = den.reciprocal_()
        y = torch.addcmul(past[0], ekv, bonus).mul_(inverse)
        if key_mask is not None:
            _fill_masked(y, ~key_mask, w, sums)
        ctx.save_for_backward(w, bonus, v, ek, inverse, y, *seen)
        ctx.mark_non_differentiable(smallest)
        return y.to(k.dtype), end, smallest

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_y: Tensor, grad_end: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        w, bonus, v, ek, inverse, y, *seen = ctx.saved_tensors
        length = v.shape[1]
        steps = _steps(length)
        x = _buffer(length, steps, last=grad_end, like=y)
        r, q = x[:, :, 1 : length + 1]
        torch.mul(grad_y, inverse, out=r)
        # the pair (R, -Q) is the gradient of the loss by the sums (numerator, denominator)
        torch.mul(r, y, out=q).neg_()
        grad_sums = _decayed_sums(x, w, steps, reverse=True)
        grad_start = grad_sums[:, :, 1]
        after = grad_sums[:, :, 2 : length + 2]
        grad_decay = _dot(after, seen[0])
        if len(seen) == 2:
            before = _decayed_sums(x, w, steps)[:, :, :length]
            grad_decay += _dot(before, seen[1])
            after = after + before
        own = r.mul_(ek)
        grad_v = torch.mul(ek, after[0]).addcmul_(own, bonus)
        own.mul_(v - y)
        grad_k = torch.addcmul(after[1], v, after[0]).mul_(ek).addcmul_(own, bonus)
        grad_u = own.sum((0, 1)) * bonus
        grads = (grad_decay * w.exp(), grad_u, grad_k.to(v.dtype), grad_v.to(v.dtype), grad_start)
        return *grads, None, None, None


def _fill_masked(y: Tensor, hidden: Tensor, w: Tensor, sums: list[Tensor]) -> None:
    """Write into ``y (B, L, C)`` what the queries in ``hidden (B, L)`` see.

    They are read where the nearest visible key was added, as the sums may decay to nothing in a long gap, and
    then only the difference of the distances to both sides counts.
    """
    length = hidden.shape[1]
    position = torch.arange(length, device=hidden.device).expand_as(hidden)
    row, query = hidden.nonzero(as_tuple=True)
    slot = (position + 1).masked_fill(hidden, 0).cummax(1).values[row, query]
    found, gaps = [sums[0][:, row, slot]], [query - slot]
    if len(sums) == 2:
        slot_after = (position + 1).masked_fill(hidden, length + 1).flip(1).cummin(1).values.flip(1)[row, query]
        found.append(sums[1][:, row, slot_after])
        # an empty side must not be the near one
        gaps[0] = gaps[0].masked_fill(slot == 0, length)
        gaps.append((slot_after - 2 - query).masked_fill(slot_after > length, length))
        near = torch.minimum(*gaps)
        found = [part * ((gap - near)[:, None] * w).exp() for part, gap in zip(found, gaps)]
    num, den = sum(found[1:], found[0])
    y[row, query] = num / den.masked_fill(den == 0, 1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products a channel: two ``(2, B, L, C)`` -> ``(C)``."""
    return torch.mul(a[0], b[0]).addcmul_(a[1], b[1]).sum((0, 1))
