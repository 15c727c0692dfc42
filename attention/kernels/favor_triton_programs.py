"""The programs of the Triton FAVOR+ kernel; what they compute is explained in ``attention.kernels.favor_triton``.

Shapes: N sequences (B * H), L ``length``, E ``width``, V ``value_width``, F ``features``, S ``splits`` of L; a
program holds BT tokens and BF features at a time, all of E (padded to BE) and V (padded to BV). Offsets are 64 bits.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (the arguments of a Triton kernel have no Python types)

import triton
import triton.language as tl


@triton.jit
def tile(base, row, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    """Pointers and mask of rows ``row ..`` of a contiguous ``(rows, columns)`` matrix."""
    r = row + tl.arange(0, BR)
    c = tl.arange(0, BC)
    at = base + r[:, None].to(tl.int64) * columns + c[None, :]
    return at, (r < rows)[:, None] & (c < columns)[None, :]


@triton.jit
def load(base, row, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    """``(BR, BC)`` fp32, zeros outside."""
    at, ok = tile(base, row, rows, columns, BR, BC)
    return tl.load(at, ok, 0.0).to(tl.float32)


@triton.jit
def key_exponents(
    k, w, hidden, t, f, length, features, half_root, MASKED: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``w_r.k' - |k'|^2 / 2`` as ``(BT, BF)``, -inf for hidden keys and beyond the edges."""
    exponents = tl.dot(k, tl.trans(w), input_precision=PRECISION) - tl.sum(k * k, 1)[:, None] * half_root
    tokens = t + tl.arange(0, BT)
    seen = tokens < length
    if MASKED:
        seen &= tl.load(hidden + tokens, seen, 1) == 0
    inside = seen[:, None] & ((f + tl.arange(0, BF)) < features)[None, :]
    return tl.where(inside, exponents, -float("inf"))


@triton.jit
def key_sums(
    key, value, rows, hidden, sums, norms, tops, length, heads, width, value_width, features, splits, span, half_root,
    never, MASKED: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, SUM_PRECISION: tl.constexpr,
):  # fmt: skip
    """One split's ``S_r = sum_j e^{a_jr - top_r} v_j``, its denominators and stabilisers, for BF features."""
    program = tl.program_id(0).to(tl.int64)
    n = program // splits
    split = program % splits
    f = tl.program_id(1) * BF
    w = load(rows, f, features, width, BF, BE)
    top = tl.zeros((BF,), tl.float32) + never
    total = tl.zeros((BF, BV), tl.float32)
    norm = tl.zeros((BF,), tl.float32)
    hidden += (n // heads) * length
    for t in range(split * span, tl.minimum((split + 1) * span, length), BT):
        k = load(key + n * length * width, t, length, width, BT, BE)
        a = key_exponents(k, w, hidden, t, f, length, features, half_root, MASKED, BT, BF, PRECISION)
        new_top = tl.maximum(top, tl.max(a, 0))
        phi = tl.exp(a - new_top[None, :])
        kept = tl.exp(top - new_top)
        v = load(value + n * length * value_width, t, length, value_width, BT, BV)
        total = total * kept[:, None] + tl.dot(tl.trans(phi), v, input_precision=SUM_PRECISION)
        norm = norm * kept + tl.sum(phi, 0)
        top = new_top
    at, ok = tile(sums + program * features * value_width, f, features, value_width, BF, BV)
    tl.store(at, total, ok)
    r = f + tl.arange(0, BF)
    tl.store(norms + program * features + r, norm, r < features)
    tl.store(tops + program * features + r, top, r < features)


@triton.jit
def query_exponents(
    q, rows, tops, f, features, width, BF: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``w_r.q' + top_r`` as ``(BT, BF)``, -inf beyond the last feature; and the BF rows."""
    w = load(rows, f, features, width, BF, BE)
    r = f + tl.arange(0, BF)
    top = tl.load(tops + r, r < features, -float("inf"))
    return tl.dot(q, tl.trans(w), input_precision=PRECISION) + top[None, :], w


@triton.jit
def query_outputs(
    query, rows, sums, norms, tops, out, log_den, length, width, value_width, features, BT: tl.constexpr,
    BF: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, SUM_PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log denominator of BT queries, over all features with a running row maximum."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BT
    q = load(query + n * length * width, t, length, width, BT, BE)
    top = tl.zeros((BT,), tl.float32) - float("inf")
    total = tl.zeros((BT, BV), tl.float32)
    norm = tl.zeros((BT,), tl.float32)
    for f in range(0, features, BF):
        e, _ = query_exponents(q, rows, tops + n * features, f, features, width, BF, BE, PRECISION)
        new_top = tl.maximum(top, tl.max(e, 1))
        phi = tl.exp(e - new_top[:, None])
        kept = tl.exp(top - new_top)
        s = load(sums + n * features * value_width, f, features, value_width, BF, BV)
        r = f + tl.arange(0, BF)
        z = tl.load(norms + n * features + r, r < features, 0.0)
        total = total * kept[:, None] + tl.dot(phi, s, input_precision=SUM_PRECISION)
        norm = norm * kept + tl.sum(phi * z[None, :], 1)
        top = new_top
    empty = norm == 0.0
    total = total / tl.where(empty, 1.0, norm)[:, None]
    at, ok = tile(out + n * length * value_width, t, length, value_width, BT, BV)
    tl.store(at, total, ok)
    tokens = t + tl.arange(0, BT)
    # +inf: a query without a key has no weights
    tl.store(log_den + n * length + tokens, tl.where(empty, float("inf"), top + tl.log(norm)), tokens < length)


@triton.jit
def query_gradients(
    query, rows, sums, norms, tops, log_den, grad, delta, grad_query, length, width, value_width, features,
    BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
):  # fmt: skip
    """``dq_i = sum_r P_ir (g_i.S_r - delta_i z_r) w_r`` of BT queries."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BT
    tokens = t + tl.arange(0, BT)
    q = load(query + n * length * width, t, length, width, BT, BE)
    g = load(grad + n * length * value_width, t, length, value_width, BT, BV)
    mean = tl.load(delta + n * length + tokens, tokens < length, 0.0)
    less = tl.load(log_den + n * length + tokens, tokens < length, float("inf"))
    total = tl.zeros((BT, BE), tl.float32)
    for f in range(0, features, BF):
        e, w = query_exponents(q, rows, tops + n * features, f, features, width, BF, BE, PRECISION)
        weights = tl.exp(e - less[:, None])
        s = load(sums + n * features * value_width, f, features, value_width, BF, BV)
        r = f + tl.arange(0, BF)
        z = tl.load(norms + n * features + r, r < features, 0.0)
        slope = tl.dot(g, tl.trans(s), input_precision=SUM_PRECISION) - mean[:, None] * z[None, :]
        total += tl.dot(weights * slope, w, input_precision=SUM_PRECISION)
    at, ok = tile(grad_query + n * length * width, t, length, width, BT, BE)
    tl.store(at, total, ok)


@triton.jit
def sum_gradients(
    query, rows, tops, log_den, grad, delta, grad_sums, grad_norms, length, width, value_width, features, splits, span,
    BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
):  # fmt: skip
    """One split's ``dS_r = sum_i P_ir g_i`` and ``dz_r = -sum_i P_ir delta_i``, for BF features."""
    program = tl.program_id(0).to(tl.int64)
    n = program // splits
    split = program % splits
    f = tl.program_id(1) * BF
    total = tl.zeros((BF, BV), tl.float32)
    norm = tl.zeros((BF,), tl.float32)
    for t in range(split * span, tl.minimum((split + 1) * span, length), BT):
        tokens = t + tl.arange(0, BT)
        q = load(query + n * length * width, t, length, width, BT, BE)
        e, _ = query_exponents(q, rows, tops + n * features, f, features, width, BF, BE, PRECISION)
        less = tl.load(log_den + n * length + tokens, tokens < length, float("inf"))
        weights = tl.exp(e - less[:, None])
        g = load(grad + n * length * value_width, t, length, value_width, BT, BV)
        mean = tl.load(delta + n * length + tokens, tokens < length, 0.0)
        total += tl.dot(tl.trans(weights), g, input_precision=SUM_PRECISION)
        norm -= tl.sum(weights * mean[:, None], 0)
    at, ok = tile(grad_sums + program * features * value_width, f, features, value_width, BF, BV)
    tl.store(at, total, ok)
    r = f + tl.arange(0, BF)
    tl.store(grad_norms + program * features + r, norm, r < features)


@triton.jit
def key_gradients(
    key, value, rows, hidden, tops, grad_sums, grad_norms, grad_key, grad_value, length, heads, width, value_width,
    features, half_root, MASKED: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, SUM_PRECISION: tl.constexpr,
):  # fmt: skip
    """``dv_j = sum_r phi_jr dS_r`` and ``dk_j = sum_r da_jr (w_r - k')`` with ``da_jr = phi_jr (v_j.dS_r + dz_r)``."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BT
    k = load(key + n * length * width, t, length, width, BT, BE)
    v = load(value + n * length * value_width, t, length, value_width, BT, BV)
    hidden += (n // heads) * length
    of_key = tl.zeros((BT, BE), tl.float32)
    of_value = tl.zeros((BT, BV), tl.float32)
    radial = tl.zeros((BT,), tl.float32)
    for f in range(0, features, BF):
        w = load(rows, f, features, width, BF, BE)
        a = key_exponents(k, w, hidden, t, f, length, features, half_root, MASKED, BT, BF, PRECISION)
        r = f + tl.arange(0, BF)
        top = tl.load(tops + n * features + r, r < features, 0.0)
        phi = tl.exp(a - top[None, :])
        s = load(grad_sums + n * features * value_width, f, features, value_width, BF, BV)
        z = tl.load(grad_norms + n * features + r, r < features, 0.0)
        slope = phi * (tl.dot(v, tl.trans(s), input_precision=SUM_PRECISION) + z[None, :])
        of_value += tl.dot(phi, s, input_precision=SUM_PRECISION)
        of_key += tl.dot(slope, w, input_precision=SUM_PRECISION)
        radial += tl.sum(slope, 1)
    of_key -= k * (2.0 * half_root * radial)[:, None]
    at, ok = tile(grad_key + n * length * width, t, length, width, BT, BE)
    tl.store(at, of_key, ok)
    at, ok = tile(grad_value + n * length * value_width, t, length, value_width, BT, BV)
    tl.store(at, of_value, ok)
