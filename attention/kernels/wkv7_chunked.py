"""WKV-7 in chunks: matrix products inside a chunk, one small product a chunk to carry the state.

Shapes: B batch, L sequence length, H heads, K key width, V value width, T steps a chunk, N chunks (N T >= L).

With u_t = S_{t-1} a_t the recurrence adds ``u_t b_t^T + v_t k_t^T`` a step, so that within a chunk that starts
from S, with d(s, t) the product of the decays of steps s+1 .. t,

    u_t = S (d(0, t-1) a_t) + sum_{s<t}  (a_t . d(s, t-1) b_s) u_s + (a_t . d(s, t-1) k_s) v_s
    y_t = S (d(0, t)   r_t) + sum_{s<=t} (r_t . d(s, t)   b_s) u_s + (r_t . d(s, t)   k_s) v_s

The first line is a unit lower triangular system in u (the WY form of Yang et al. 2024, "Parallelizing linear
transformers with the delta rule"). Its solution is affine in S, so a whole chunk is ``S <- S M + G``.

d(s, t) does not factor safely: 1 / d(0, s) overflows under a strong decay. It does factor at any step m between
s and t, as d(s, m) d(m, t), and both factors are products of decays, hence at most 1. Cutting the chunk in halves,
the halves in halves and so on gives every pair (s, t) such an m; no exponent is ever positive, nothing is clamped.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

STEPS = 16
"""Steps T a chunk, a power of two."""
SEGMENT = 1024
"""Steps whose intermediate results are kept for the backward at once; longer sequences recompute by segment."""


def wkv7_chunked(
    r: Tensor, logw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``r, logw, k, a, b (B, L, H, K)``, ``v (B, L, H, V)``, ``state (B, H, V, K)`` -> ``y (B, L, H, V)``, state.

    All in one dtype, which is the dtype of every sum.
    """
    inputs = (r, logw, k, v, a, b)
    if r.shape[1] <= SEGMENT:
        return _segment(*inputs, state)
    outputs = []
    for parts in zip(*(x.split(SEGMENT, 1) for x in inputs)):
        y, state = checkpoint(_segment, *parts, state, use_reentrant=False, preserve_rng_state=False)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _segment(
    r: Tensor, logw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = r.shape[1]
    steps = min(STEPS, 1 << (length - 1).bit_length())
    # steps of zeros at the end leave the state as it is
    r, logw, k, v, a, b = (_chunks(x, steps) for x in (r, logw, k, v, a, b))
    decay = logw.exp()
    rows = torch.stack((a, r * decay), -2)
    columns = torch.stack((b, k), -2)
    pairs, rows, columns, decay = _pairs(rows, columns, decay, torch.stack(((r * b).sum(-1), (r * k).sum(-1)), -1))
    a, r = rows.unbind(-2)
    b, k = columns.unbind(-2)
    (ab, ak), (rb, rk) = (row.unbind(-1) for row in pairs.unbind(-3))

    right = torch.cat((a, ak @ v), -1)
    from_state, from_values = torch.linalg.solve_triangular(-ab, right, upper=False, unitriangular=True).split(
        (a.shape[-1], v.shape[-1]), -1
    )
    factor = torch.diag_embed(decay) + from_state.mT @ b
    added = from_values.mT @ b + v.mT @ k
    states = _Carry.apply(factor, added, state)
    found = states[:, :, :-1].mT
    y = r @ found + rb @ (from_values + from_state @ found) + rk @ v
    return y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], states[:, :, -1]


def _chunks(x: Tensor, steps: int) -> Tensor:
    """``(B, L, H, E)`` -> ``(B, H, N, T, E)``, filled up with zeros."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % steps))
    return x.unflatten(1, (-1, steps)).permute(0, 3, 1, 2, 4)


def _pairs(rows: Tensor, columns: Tensor, decay: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of every row with the columns before it, decayed on the way.

    ``rows (..., T, 2, K)`` hold ``a_t`` and ``d(t-1, t) r_t``, ``columns (..., T, 2, K)`` ``b_s`` and ``k_s``,
    ``decay (..., T, K)``, ``own (..., T, 2)`` the products of r_t with b_t and k_t. Returns the products
    ``(..., T, 2, T, 2)``, rows decayed from the start of the chunk, columns to its end, decay ``(..., K)`` of it all.

    Blocks of h steps become blocks of 2h: the second half's rows reach back to the middle already, the first
    half's columns forward to it, so their plain product is the block that is new.
    """
    lead, steps = rows.shape[:-3], rows.shape[-3]
    rows, columns = rows[..., None, :, :], columns[..., None, :, :]
    products = torch.stack((torch.zeros_like(own), own), -2)
    size = 1
    while size < steps:
        # (..., T / 2h, 2, h, 2, K)
        rows, columns, decay = (x.unflatten(len(lead), (-1, 2)) for x in (rows, columns, decay))
        (first_rows, second_rows), (first_columns, second_columns) = (x.unbind(len(lead) + 1) for x in (rows, columns))
        first, second = decay.unbind(-2)
        new = second_rows.flatten(-3, -2) @ first_columns.flatten(-3, -2).mT
        top, bottom = products.unflatten(len(lead), (-1, 2)).unbind(len(lead) + 1)
        products = torch.cat((pad(top, (0, 2 * size)), torch.cat((new, bottom), -1)), -2)
        rows = torch.cat((first_rows, second_rows * first[..., None, None, :]), -3)
        columns = torch.cat((first_columns * second[..., None, None, :], second_columns), -3)
        decay = first * second
        size *= 2
    products = products.view(*lead, steps, 2, steps, 2)
    return products, rows.squeeze(-4), columns.squeeze(-4), decay.squeeze(-2)


class _Carry(torch.autograd.Function):
    """``S_{n+1} = S_n M_n + G_n``: ``M (B, H, N, K, K)``, ``G (B, H, N, V, K)``, S_0 -> all S ``(B, H, N + 1, V, K)``.

    Written out because autograd would keep a node and two copies a chunk.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, factor: Tensor, added: Tensor, state: Tensor) -> Tensor:
        states = [state]
        for factor_n, added_n in zip(factor.unbind(2), added.unbind(2)):
            states.append(states[-1] @ factor_n + added_n)
        result = torch.stack(states, 2)
        ctx.save_for_backward(factor, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor, states = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            given, factors = grad.unbind(2), factor.unbind(2)
            after = [given[-1]]
            for n in reversed(range(len(factors))):
                after.append(given[n] + after[-1] @ factors[n].mT)
            grad_added = torch.stack(after[-2::-1], 2)
            return states[:, :, :-1].mT @ grad_added, grad_added, after[-1]
