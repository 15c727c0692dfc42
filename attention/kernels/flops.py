"""What one call of an op costs in FLOPs, whichever kernel runs it.

Shapes: B batch, H heads, L sequence length, E head width of q and k, Ev of v, M rows of the projection, F features,
C channels, N states a channel, K and V key and value width.

Counted is what the definition of the op asks for: two FLOPs for every product that is added to a sum, in matrix
products and in the updates and readouts of recurrences alike. Not counted: exponentials and other functions,
normalisation, masks, and whatever a kernel computes a second time to save memory. Padding counts, as positions do in
the matrix products around the op; of a causal op only the pairs that it sees count. The backward pass has two products
for each product of two tensors, and one where one factor is constant (the projection of FAVOR+).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """FLOPs of one call."""

    forward: int
    backward: int


def _trained(forward: int) -> Cost:
    return Cost(forward, 2 * forward)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **_: object) -> Cost:
    """Scores and weighted sum over all visible pairs: ``2 B H pairs (E + Ev)``."""
    batch, heads, length, width = q.shape
    pairs = length * (length + 1) // 2 if causal else length * length
    return _trained(2 * batch * heads * pairs * (width + v.shape[-1]))


def _sums(v: Tensor, features: int) -> int:
    """Keys into a state ``(F, Ev + 1)`` and queries out of it: ``4 B H L F (Ev + 1)``."""
    batch, heads, length, width = v.shape
    return 4 * batch * heads * length * features * (width + 1)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Cost:
    """The state of F = E features; the causal form updates and reads it as often."""
    return _trained(_sums(v, q.shape[-1]))


def _favor_attention(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, *, features: str = "positive", **_: object
) -> Cost:
    """Projections of q and k, ``4 B H L E M``, and the state of F = M or 2 M features."""
    rows = projection.shape[0]
    projected = 4 * q.numel() * rows
    sums = _sums(v, rows if features == "positive" else 2 * rows)
    return Cost(projected + sums, projected + 2 * sums)


def _wkv4(time_decay: Tensor, u: Tensor, k: Tensor, v: Tensor, *, bidirectional: bool = False, **_: object) -> Cost:
    """A position and channel: decayed numerator and denominator of each direction, e^k v and e^(u + k) v once each."""
    return _trained(2 * k.numel() * (6 if bidirectional else 4))


def _wkv7(r: Tensor, logw: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: object) -> Cost:
    """A position and head: S diag(w), S a, (S a) b^T, v k^T and S r, ``V K`` products each."""
    return _trained(2 * 5 * k.numel() * v.shape[-1])


def _selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, **_: object) -> Cost:
    """A position and channel: e^(dt A) h, dt u B and C h, N products each, and D u."""
    return _trained(2 * u.numel() * (3 * A.shape[1] + (D is not None)))


COSTS: dict[str, Callable[..., Cost]] = {
    "softmax_attention": _softmax_attention,
    "favor_attention": _favor_attention,
    "linear_attention": _linear_attention,
    "wkv4": _wkv4,
    "wkv7": _wkv7,
    "selective_scan": _selective_scan,
}
"""By op; each takes the arguments that a kernel of the op takes."""

OUTPUT_LIKE = {"wkv4": 3, "wkv7": 3, "selective_scan": 0}
"""Ops that return (output, end state): which argument the output has the shape and dtype of. Of the others it is v."""
