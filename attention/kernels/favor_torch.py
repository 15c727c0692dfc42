"""FAVOR+ in chunks over the length: the features of a whole sequence are never held.

Shapes: N = B * H, L sequence length, T chunk length, E head width, F features; q and k ``(N, L, E)``, values
``(N, T, Ev + 1)`` whose last column of ones sums to the denominator, state ``(N, F, Ev + 1)``.

Autograd would keep several ``(N, L, F)`` tensors. Here the forward pass keeps the inputs, the output and the
state, and the backward pass computes the features of a chunk again; a chunk fits the cache, which pays for
the arithmetic.

With ``o_i = phi(q_i) S``, numerator and denominator side by side, and ``g`` the gradient of the output:
``do = [g, -g.out] / den``, ``dphi(q) = do S^T``, ``dS = phi(q)^T do``, ``dphi(k) = values dS^T``,
``dvalues = phi(k) dS``. Stabilisers cancel in the ratio, so their gradient is zero.
"""

from functools import partial

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from attention.kernels.favor_features import Hidden, Positive, Trig
from attention.kernels.inputs import accumulation_dtype, zero_hidden

FEATURES = {"positive": Positive, "hyperbolic": partial(Positive, signs=(1, -1)), "trig": Trig}
TILE = {"cpu": 2**19, "cuda": 2**26}
"""Numbers in the features of one chunk: about the last-level cache on a CPU; few launches on a GPU."""
CAUSAL_CHUNK = 64
"""T of the causal form: the T x T weights of a chunk stay smaller than its features."""

Map = Positive | Trig


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projection: torch.Tensor,
    *,
    features: str,
    key_mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """The "torch" kernel of ``favor_attention``."""
    if key_mask is not None:
        k, v = zero_hidden(k, v, key_mask)
    form = _Causal if causal else _Bidirectional
    return form.apply(q, k, v, projection, key_mask, features)


def initial_state(projection: torch.Tensor, count: int, *, features: str) -> tuple[torch.Tensor, torch.Tensor]:
    """State ``(N, F, E + 1)`` and stabiliser ``(N, 1, F or 1)`` of N = ``count`` streams before their first token."""
    feature_map = FEATURES[features](projection.to(accumulation_dtype(projection.dtype)))
    top = feature_map.first_top(count)
    return top.new_zeros(count, feature_map.num_features, projection.shape[1] + 1), top


def favor_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projection: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    *,
    features: str,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One token of the causal form: ``q, k, v (B, H, E)`` -> ``(B, H, E)`` and the next state.

    The state shrinks whenever a key raises the stabiliser, so it neither overflows nor does a denominator vanish.
    """
    sums, top = state
    feature_map = FEATURES[features](projection.to(sums.dtype))
    queries, keys, values = (x.flatten(0, 1)[:, None].to(sums.dtype) for x in (q, k, v))  # (N, 1, E)
    phi_k, new_top = feature_map.advance(keys, None, top)
    values = functional.pad(values, (0, 1), value=1.0)
    sums = torch.baddbmm(sums * _decay(top, new_top), phi_k.transpose(1, 2), values)
    out, _ = _ratio(feature_map.queries(queries, new_top) @ sums)
    return out.view_as(v).to(v.dtype), (sums, new_top)


class _Sequence:
    """Inputs as ``(N, L, E)``, handed out by the chunk in the dtype that exponents and sums need."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        projection: torch.Tensor,
        mask: Hidden,
        name: str,
    ) -> None:
        self.dtype = accumulation_dtype(v.dtype)
        self.map: Map = FEATURES[name](projection.to(self.dtype))
        self.shape = v.shape
        self.q, self.k, self.v = (x.flatten(0, 1) for x in (q, k, v))
        self.hidden = None if mask is None else ~mask.repeat_interleave(v.shape[1], 0)[..., None]

    def tile(self) -> int:
        """Chunk length of the bidirectional form."""
        return max(64, TILE[self.v.device.type] // (max(1, self.v.shape[0]) * self.map.num_features))

    def chunks(self, length: int) -> list[slice]:
        """Consecutive slices of L."""
        return [slice(start, start + length) for start in range(0, self.v.shape[1], length)]

    def queries(self, part: slice) -> torch.Tensor:
        """``(N, T, E)``."""
        return self.q[:, part].to(self.dtype)

    def keys(self, part: slice) -> tuple[torch.Tensor, Hidden]:
        """``(N, T, E)`` and which of them are hidden."""
        return self.k[:, part].to(self.dtype), None if self.hidden is None else self.hidden[:, part]

    def values(self, part: slice) -> torch.Tensor:
        """``(N, T, Ev + 1)``."""
        return functional.pad(self.v[:, part].to(self.dtype), (0, 1), value=1.0)

    def empty_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """State ``(N, F, Ev + 1)`` and stabiliser before any key."""
        count, _, value_width = self.v.shape
        state = self.map.rows.new_zeros(count, self.map.num_features, value_width + 1)
        return state, self.map.first_top(count)

    def gradients(self) -> list[torch.Tensor]:
        """Room for the gradients of q, k and v."""
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.q, self.k, self.v)]

    def unflatten(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, L, .) -> (B, H, L, .)``."""
        return x.unflatten(0, self.shape[:2])


def _ratio(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and 1 / denominator; both zero where no key was visible."""
    denominator = sums[..., -1:]
    inverse = torch.where(denominator == 0, 0.0, denominator.reciprocal())
    return sums[..., :-1] * inverse, inverse


def _grad_sums(grad: torch.Tensor, out: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``do = [g, -g.out] / den``, ``(N, T, Ev + 1)``."""
    grad = grad.to(inverse.dtype)
    return torch.cat([grad, -(grad * out).sum(-1, keepdim=True)], -1).mul_(inverse)


def _decay(top: torch.Tensor, new_top: torch.Tensor) -> torch.Tensor:
    """Factor ``(N, F or 1, 1)`` that brings a state from one stabiliser to a larger one."""
    return (top - new_top).exp().transpose(1, 2)


class _Bidirectional(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        projection: torch.Tensor,
        mask: Hidden,
        name: str,
    ) -> torch.Tensor:
        seq = _Sequence(q, k, v, projection, mask, name)
        state, top = seq.empty_state()
        parts = seq.chunks(seq.tile())
        for part in parts:
            phi, new_top = seq.map.advance(*seq.keys(part), top)
            state = torch.baddbmm(state * _decay(top, new_top), phi.transpose(1, 2), seq.values(part))
            top = new_top
        out = torch.empty_like(seq.v, memory_format=torch.contiguous_format)
        inverse = state.new_empty(*out.shape[:2], 1)
        for part in parts:
            out[:, part], inverse[:, part] = _ratio(seq.map.queries(seq.queries(part), top) @ state)
        out = seq.unflatten(out)
        ctx.save_for_backward(q, k, v, projection, mask, out, inverse, state, top)
        ctx.name = name
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, out, inverse, state, top = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            seq = _Sequence(*inputs, ctx.name)
            grad, out = grad.flatten(0, 1), out.flatten(0, 1)
            grad_q, grad_k, grad_v = seq.gradients()
            grad_state = torch.zeros_like(state)
            parts = seq.chunks(seq.tile())
            for part in parts:
                q = seq.queries(part)
                phi = seq.map.queries(q, top)
                grad_sums = _grad_sums(grad[:, part], out[:, part], inverse[:, part])
                grad_state.baddbmm_(phi.transpose(1, 2), grad_sums)
                grad_q[:, part] = seq.map.grad_queries(q, phi, grad_sums @ state.transpose(1, 2))
            for part in parts:
                k, hidden = seq.keys(part)
                phi = seq.map.keys(k, hidden, top)
                grad_v[:, part] = (phi @ grad_state)[..., :-1]
                grad_k[:, part] = seq.map.grad_keys(k, phi, seq.values(part) @ grad_state.transpose(1, 2))
            return *(seq.unflatten(x) for x in (grad_q, grad_k, grad_v)), None, None, None


class _Causal(torch.autograd.Function):
    """Prefix sums: a chunk sees the state of what came before and, by lower-triangular weights, itself."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        projection: torch.Tensor,
        mask: Hidden,
        name: str,
    ) -> torch.Tensor:
        seq = _Sequence(q, k, v, projection, mask, name)
        state, top = seq.empty_state()
        out = torch.empty_like(seq.v, memory_format=torch.contiguous_format)
        inverse = state.new_empty(*out.shape[:2], 1)
        started = None if seq.hidden is None else ~seq.hidden.cummin(1).values
        states, tops, exact = [], [], []
        for part in seq.chunks(CAUSAL_CHUNK):
            states.append(state)
            tops.append(top)
            q_part, (k_part, hidden), values = seq.queries(part), seq.keys(part), seq.values(part)
            phi_k, new_top = seq.map.advance(k_part, hidden, top)
            carried = state * _decay(top, new_top)
            sums = _fast_chunk(seq.map.queries(q_part, new_top), phi_k, values, carried)
            exact.append(seq.map.always_exact or _underflows(sums, None if started is None else started[:, part]))
            if exact[-1]:
                sums = _exact_chunk(seq.map, q_part, k_part, hidden, values, state, top)
            out[:, part], inverse[:, part] = _ratio(sums)
            state, top = torch.baddbmm(carried, phi_k.transpose(1, 2), values), new_top
        out = seq.unflatten(out)
        ctx.save_for_backward(q, k, v, projection, mask, out, inverse, torch.stack(states), torch.stack([*tops, top]))
        ctx.name, ctx.exact = name, exact
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, out, inverse, states, tops = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            seq = _Sequence(*inputs, ctx.name)
            grad, out = grad.flatten(0, 1), out.flatten(0, 1)
            grads = seq.gradients()
            grad_state = torch.zeros_like(states[0])
            for index, part in reversed(list(enumerate(seq.chunks(CAUSAL_CHUNK)))):
                grad_sums = _grad_sums(grad[:, part], out[:, part], inverse[:, part])
                step = _exact_backward if ctx.exact[index] else _fast_backward
                *parts, grad_state = step(seq, part, states[index], tops[index], tops[index + 1], grad_sums, grad_state)
                for whole, of_part in zip(grads, parts, strict=True):
                    whole[:, part] = of_part
            return *(seq.unflatten(x) for x in grads), None, None, None


def _underflows(sums: torch.Tensor, started: torch.Tensor | None) -> bool:
    """True if a row has lost digits because a later key of its chunk raised the stabiliser.

    What vanished is below the smallest number; a denominator above its square root cannot have missed it.
    """
    lost = sums[..., -1:] < torch.finfo(sums.dtype).tiny ** 0.5
    return bool((lost if started is None else lost & started).any())


def _fast_chunk(phi_q: torch.Tensor, phi_k: torch.Tensor, values: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
    """``(N, T, Ev + 1)`` with one stabiliser for the whole chunk."""
    weights = (phi_q @ phi_k.transpose(1, 2)).tril_()
    return torch.baddbmm(phi_q @ carried, weights, values)


def _exact_chunk(
    feature_map: Map,
    q: torch.Tensor,
    k: torch.Tensor,
    hidden: Hidden,
    values: torch.Tensor,
    state: torch.Tensor,
    top: torch.Tensor,
) -> torch.Tensor:
    """``(N, T, Ev + 1)`` with one stabiliser a row."""
    phi_q, weights = feature_map.exact(q, k, hidden, top)
    return phi_q @ state + weights @ values


def _fast_backward(
    seq: _Sequence,
    part: slice,
    state: torch.Tensor,
    top: torch.Tensor,
    new_top: torch.Tensor,
    grad_sums: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v of the chunk and of the state before it, given that of the state after it."""
    q, (k, hidden), values = seq.queries(part), seq.keys(part), seq.values(part)
    decay = _decay(top, new_top)
    phi_q, phi_k = seq.map.queries(q, new_top), seq.map.keys(k, hidden, new_top)
    weights = (phi_q @ phi_k.transpose(1, 2)).tril_()
    grad_weights = (grad_sums @ values.transpose(1, 2)).tril_()
    grad_phi_q = torch.baddbmm(grad_weights @ phi_k, grad_sums, (state * decay).transpose(1, 2))
    grad_phi_k = torch.baddbmm(values @ grad_state.transpose(1, 2), grad_weights.transpose(1, 2), phi_q)
    grad_v = torch.baddbmm(phi_k @ grad_state, weights.transpose(1, 2), grad_sums)[..., :-1]
    grad_before = torch.baddbmm(grad_state, phi_q.transpose(1, 2), grad_sums) * decay
    return (
        seq.map.grad_queries(q, phi_q, grad_phi_q),
        seq.map.grad_keys(k, phi_k, grad_phi_k),
        grad_v,
        grad_before,
    )


def _exact_backward(
    seq: _Sequence,
    part: slice,
    state: torch.Tensor,
    top: torch.Tensor,
    new_top: torch.Tensor,
    grad_sums: torch.Tensor,
    grad_state: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As ``_fast_backward`` for a chunk that ran ``_exact_chunk``."""
    k, hidden = seq.keys(part)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (seq.queries(part), k, seq.values(part), state)]
        sums = _exact_chunk(seq.map, leaves[0], leaves[1], hidden, leaves[2], leaves[3], top)
        grad_q, grad_k, grad_values, grad_before = torch.autograd.grad(sums, leaves, grad_sums)
    # through the state after the chunk
    phi_k = seq.map.keys(k, hidden, new_top)
    grad_values += phi_k @ grad_state
    grad_k += seq.map.grad_keys(k, phi_k, seq.values(part) @ grad_state.transpose(1, 2))
    return grad_q, grad_k, grad_values[..., :-1], grad_before + grad_state * _decay(top, new_top)
