"""FAVOR+: softmax attention through random features ("Performers", Choromanski et al. 2021).

Shapes: B batch, H heads, L sequence length, E head width, M rows of the projection, F features,
q and k ``(B, H, L, E)``, v ``(B, H, L, Ev)``, projection W ``(M, E)``, key_mask bool ``(B, L)`` with
True = real token.

With ``x' = x E^(-1/4)``, so that ``q'.k' = q.k / sqrt(E)``, and rows ``w_r ~ N(0, I)``, all are unbiased,
``E[phi(q).phi(k)] = exp(q'.k')``:

    positive    phi(x) = M^(-1/2) exp(w_r.x' - |x'|^2 / 2)                            F = M     lemma 1
    hyperbolic  phi(x) = (2M)^(-1/2) exp(-|x'|^2 / 2) [exp(w_r.x'), exp(-w_r.x')]     F = 2M    lemma 1
    trig        phi(x) = M^(-1/2) exp(|x'|^2 / 2) [cos(w_r.x'), sin(w_r.x')]          F = 2M    section 2.3

    out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)         j over visible keys

No epsilon is added to the features: large inputs make features so small that even 1e-6 turns attention into
a plain mean of v. Factors that cancel in the ratio keep exponents from over- and underflow instead.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from attention.kernels import dispatch, favor_native, favor_triton, native
from attention.kernels.favor_torch import FEATURES, chunked
from attention.kernels.inputs import check_qkv, check_tensors, finite_max, hidden_pairs, still_alone, zero_hidden

OP = "favor_attention"
PROJECTIONS = ("orthogonal", "regularised", "iid")


def favor_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projection: torch.Tensor,
    *,
    features: str = "positive",
    key_mask: torch.Tensor | None = None,
    causal: bool = False,
    kernel: str = "auto",
) -> torch.Tensor:
    """FAVOR+ attention: ``(B, H, L, Ev)``; a query that sees no key gives zeros and gets zero gradients."""
    check_qkv(q, k, v, key_mask, OP)
    check_tensors(OP, q=q, projection=projection)
    if features not in FEATURES:
        raise ValueError(f"attention.features={features!r} is unknown; choose {' | '.join(FEATURES)}")
    if projection.dim() != 2 or projection.shape[1] != q.shape[-1] or not projection.shape[0]:
        raise ValueError(
            f"{OP}: projection must be (M, {q.shape[-1]}), a row a feature; got {tuple(projection.shape)}; "
            f"orthogonal_projection(M, {q.shape[-1]}) draws one"
        )
    q, k = still_alone(q, k, key_mask)
    options = {"features": features, "key_mask": key_mask, "causal": causal}
    return dispatch.call(OP, kernel, q.device, q, k, v, projection, **options)


def orthogonal_projection(
    num_features: int,
    width: int,
    *,
    kind: str = "orthogonal",
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Draw W ``(num_features, width)`` on the CPU, the same for every dtype.

    ``orthogonal``: independent Haar blocks, each row scaled by its own chi(width) norm, so that a single row
    is distributed as N(0, I) and the features stay unbiased. ``regularised``: all norms sqrt(width), lower
    variance but biased. ``iid``: N(0, I) rows.
    """
    if kind not in PROJECTIONS:
        raise ValueError(f"attention.projection={kind!r} is unknown; choose {' | '.join(PROJECTIONS)}")
    gaussian = torch.randn(num_features, width, generator=generator, dtype=torch.float64)
    if kind == "iid":
        return gaussian.to(dtype)
    num_blocks = -(-num_features // width)
    blocks = torch.randn(num_blocks, width, width, generator=generator, dtype=torch.float64)
    orthogonal, triangular = torch.linalg.qr(blocks)
    # QR is unique, and its Q Haar distributed, once the diagonal of R is positive (Mezzadri 2007)
    orthogonal = orthogonal * triangular.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    # each block's own rows are orthogonal, blocks are independent of each other
    rows = orthogonal.flatten(0, 1)[:num_features]
    norms = gaussian.norm(dim=1, keepdim=True) if kind == "orthogonal" else width**0.5
    return (rows * norms).to(dtype)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projection: torch.Tensor,
    *,
    features: str,
    key_mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """All features and the L x L weights, materialised in float64.

    Features are bounded by 1 a token; how far a key lies below the largest that its query sees comes in as a factor
    of their weight, so that small keys after large ones still count.
    """
    if key_mask is not None:
        k, v = zero_hidden(k, v, key_mask)
    scale = q.shape[-1] ** -0.25
    queries, keys, rows = q.double() * scale, k.double() * scale, projection.double()
    phi_q, phi_k, size = _features(queries, keys, rows, features)
    hidden = hidden_pairs(key_mask, causal, q.shape[2], q.device)
    sizes = size.transpose(-1, -2).expand(*size.shape[:2], q.shape[2], -1)  # (B, H, L, L)
    if hidden is not None:
        sizes = sizes.masked_fill(hidden, -torch.inf)
    weights = phi_q @ phi_k.transpose(-1, -2) * (sizes - finite_max(sizes)).exp()
    values = functional.pad(v.double(), (0, 1), value=1.0)  # its last column sums to the denominator
    sums = weights @ values
    numerator, denominator = sums[..., :-1], sums[..., -1:]
    empty = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1.0)).masked_fill(empty, 0.0).to(v.dtype)


def _features(
    queries: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, features: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(B, H, L, F)`` features of queries, up to factors that cancel in the ratio, and of keys over their sizes.

    The last result is the logarithm of those sizes, ``(B, H, L, 1)``.
    """
    half_norm = keys.square().sum(-1, keepdim=True) / 2
    if features == "trig":
        projected_q, projected_k = queries @ rows.T, keys @ rows.T
        phi_q = torch.cat([projected_q.cos(), projected_q.sin()], -1)
        phi_k = torch.cat([projected_k.cos(), projected_k.sin()], -1)
        return phi_q, phi_k, half_norm
    if features == "hyperbolic":
        rows = torch.cat([rows, -rows])
    log_q = queries @ rows.T  # |q'|^2 / 2 is one factor for the whole row i and cancels
    log_k = keys @ rows.T
    top = finite_max(log_k)
    return (log_q - finite_max(log_q)).exp(), (log_k - top).exp(), top - half_norm


def _torch_refuses(*args: torch.Tensor, **_: object) -> str | None:
    if args[3].requires_grad:
        return "it gives the projection no gradient; use attention.kernel=reference or projection.detach()"
    return None


def _native_refuses(*args: torch.Tensor, **options: object) -> str | None:
    return _torch_refuses(*args) or favor_native.refuses(*args, **options)


def _triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, projection: torch.Tensor, **options: object
) -> torch.Tensor:
    """The Triton kernel takes what it must not see as zeros."""
    if options["key_mask"] is not None:
        k, v = zero_hidden(k, v, options["key_mask"])
    return favor_triton.KERNEL.run(q, k, v, projection, **options)


dispatch.register(
    OP,
    [
        replace(favor_triton.KERNEL, run=_triton),
        dispatch.Kernel("cpp", favor_native.native, ("cpu",), partial(native.missing, "favor"), _native_refuses),
        dispatch.Kernel("torch", chunked, refuses=_torch_refuses),
        dispatch.Kernel("reference", _reference),
    ],
)
