"""The programs of the Triton WKV-4 kernel; what they compute is explained in ``attention.kernels.wkv4_triton``.

Shapes: B batch, L ``length``, C channels, N ``chunks`` of T ``steps``, W channels a program. Offsets are 64 bits.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (the arguments of a Triton kernel have no Python types)

import triton
import triton.language as tl


@triton.jit
def _place(C, length, steps, chunks, W: tl.constexpr):
    """This program's channels, their mask, its (batch, chunk) row and the chunk's first token and end."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * W + tl.arange(0, W)
    batch = row // chunks
    chunk = row % chunks
    first = batch * length + chunk * steps
    end = batch * length + tl.minimum((chunk + 1) * steps, length)
    return c, c < C, row, batch, chunk, first, end


@triton.jit
def forward(
    decay, bonus, key, value, start, last, y, log_den, C, length, steps, chunks, never,
    EMIT: tl.constexpr, CARRIED: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """EMIT: y and log D of a chunk from ``start``; else only the chunk's own sums. The sums end in ``last``.

    ``start`` and ``last`` are ``(3, B * N, C)`` when CARRIED or not EMIT, else ``(3, B, C)`` with N = 1.
    """
    c, ok, row, batch, chunk, first, end = _place(C, length, steps, chunks, W)
    w = -tl.exp(tl.load(decay + c, ok, 0.0).to(tl.float32))
    u = tl.load(bonus + c, ok, 0.0).to(tl.float32)
    plane = tl.num_programs(0).to(tl.int64) * C
    here = row * C + c
    num = tl.zeros((W,), tl.float32)
    den = tl.zeros((W,), tl.float32)
    scale = tl.zeros((W,), tl.float32) + never
    if EMIT:
        num = tl.load(start + here, ok, 0.0)
        den = tl.load(start + plane + here, ok, 0.0)
        scale = tl.load(start + 2 * plane + here, ok, 0.0)
    for t in range(first, end):
        at = t * C + c
        k = tl.load(key + at, ok, 0.0).to(tl.float32)
        v = tl.load(value + at, ok, 0.0).to(tl.float32)
        if EMIT:
            top = tl.maximum(scale, u + k)
            past = tl.exp(scale - top)
            now = tl.exp(u + k - top)
            total = past * den + now
            empty = total == 0.0
            tl.store(y + at, (past * num + now * v) / tl.where(empty, 1.0, total), ok)
            # +inf: a query without a key gives no gradient
            tl.store(log_den + at, tl.where(empty, float("inf"), tl.log(total) + top), ok)
        top = tl.maximum(tl.ceil(tl.maximum(scale + w, k)), never)
        past = tl.exp(scale - top + w)
        now = tl.exp(k - top)
        num = past * num + now * v
        den = past * den + now
        scale = top
    if not CARRIED:
        tl.store(last + here, num, ok)
        tl.store(last + plane + here, den, ok)
        tl.store(last + 2 * plane + here, scale, ok)


@triton.jit
def carry(
    decay, sums, start, last, C, length, steps, chunks, never, W: tl.constexpr
):  # fmt: skip
    """Replace the own sums of every chunk ``(3, B * N, C)`` by what it starts from; the end state to ``last``."""
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * W + tl.arange(0, W)
    ok = c < C
    w = -tl.exp(tl.load(decay + c, ok, 0.0).to(tl.float32))
    edge = tl.num_programs(0).to(tl.int64) * C
    plane = edge * chunks
    here = batch * C + c
    num = tl.load(start + here, ok, 0.0)
    den = tl.load(start + edge + here, ok, 0.0)
    scale = tl.load(start + 2 * edge + here, ok, 0.0)
    for chunk in range(chunks):
        at = (batch * chunks + chunk) * C + c
        own_num = tl.load(sums + at, ok, 0.0)
        own_den = tl.load(sums + plane + at, ok, 0.0)
        own_scale = tl.load(sums + 2 * plane + at, ok, 0.0)
        tl.store(sums + at, num, ok)
        tl.store(sums + plane + at, den, ok)
        tl.store(sums + 2 * plane + at, scale, ok)
        gone = w * tl.minimum(steps, length - chunk * steps).to(tl.float32)
        top = tl.maximum(tl.ceil(tl.maximum(scale + gone, own_scale)), never)
        past = tl.exp(scale - top + gone)
        now = tl.exp(own_scale - top)
        num = past * num + now * own_num
        den = past * den + now * own_den
        scale = top
    tl.store(last + here, num, ok)
    tl.store(last + edge + here, den, ok)
    tl.store(last + 2 * edge + here, scale, ok)


@triton.jit
def backward(
    decay, bonus, key, value, y, log_den, grad, start, last, grad_key, grad_value, grad_w, grad_u,
    C, length, steps, chunks, never, EMIT: tl.constexpr, CARRIED: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """As ``forward`` towards earlier tokens; the sums are R, Q, R', Q' and their scale, five planes."""
    c, ok, row, batch, chunk, first, end = _place(C, length, steps, chunks, W)
    w = -tl.exp(tl.load(decay + c, ok, 0.0).to(tl.float32))
    u = tl.load(bonus + c, ok, 0.0).to(tl.float32)
    plane = tl.num_programs(0).to(tl.int64) * C
    here = row * C + c
    r_sum = tl.zeros((W,), tl.float32)
    q_sum = tl.zeros((W,), tl.float32)
    r_slope = tl.zeros((W,), tl.float32)
    q_slope = tl.zeros((W,), tl.float32)
    scale = tl.zeros((W,), tl.float32) + never
    sum_w = tl.zeros((W,), tl.float32)
    sum_u = tl.zeros((W,), tl.float32)
    if EMIT:
        r_sum = tl.load(start + here, ok, 0.0)
        q_sum = tl.load(start + plane + here, ok, 0.0)
        r_slope = tl.load(start + 2 * plane + here, ok, 0.0)
        q_slope = tl.load(start + 3 * plane + here, ok, 0.0)
        scale = tl.load(start + 4 * plane + here, ok, 0.0)
    for back in range(end - first):
        at = (end - 1 - back) * C + c
        g = tl.load(grad + at, ok, 0.0).to(tl.float32)
        mean = tl.load(y + at, ok, 0.0).to(tl.float32)
        less = -tl.load(log_den + at, ok, 0.0)
        if EMIT:
            k = tl.load(key + at, ok, 0.0).to(tl.float32)
            v = tl.load(value + at, ok, 0.0).to(tl.float32)
            seen = tl.exp(k + scale)
            own = g * tl.exp(u + k + less)
            tl.store(grad_value + at, seen * r_sum + own, ok)
            tl.store(grad_key + at, seen * (v * r_sum - q_sum) + own * (v - mean), ok)
            sum_u += own * (v - mean)
            sum_w += seen * (v * r_slope - q_slope)
        top = tl.maximum(tl.ceil(tl.maximum(scale + w, less)), never)
        past = tl.exp(scale - top + w)
        now = g * tl.exp(less - top)
        r_slope = past * (r_slope + r_sum)
        q_slope = past * (q_slope + q_sum)
        r_sum = past * r_sum + now
        q_sum = past * q_sum + now * mean
        scale = top
    if EMIT:
        tl.store(grad_w + here, sum_w, ok)
        tl.store(grad_u + here, sum_u, ok)
    if not CARRIED:
        tl.store(last + here, r_sum, ok)
        tl.store(last + plane + here, q_sum, ok)
        tl.store(last + 2 * plane + here, r_slope, ok)
        tl.store(last + 3 * plane + here, q_slope, ok)
        tl.store(last + 4 * plane + here, scale, ok)


@triton.jit
def carry_back(
    decay, sums, start, last, C, length, steps, chunks, never, W: tl.constexpr
):  # fmt: skip
    """``carry`` from the last chunk to the first, for the five planes of ``backward``."""
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * W + tl.arange(0, W)
    ok = c < C
    w = -tl.exp(tl.load(decay + c, ok, 0.0).to(tl.float32))
    edge = tl.num_programs(0).to(tl.int64) * C
    plane = edge * chunks
    here = batch * C + c
    r_sum = tl.load(start + here, ok, 0.0)
    q_sum = tl.load(start + edge + here, ok, 0.0)
    r_slope = tl.load(start + 2 * edge + here, ok, 0.0)
    q_slope = tl.load(start + 3 * edge + here, ok, 0.0)
    scale = tl.load(start + 4 * edge + here, ok, 0.0)
    for back in range(chunks):
        chunk = chunks - 1 - back
        at = (batch * chunks + chunk) * C + c
        own_r = tl.load(sums + at, ok, 0.0)
        own_q = tl.load(sums + plane + at, ok, 0.0)
        own_r_slope = tl.load(sums + 2 * plane + at, ok, 0.0)
        own_q_slope = tl.load(sums + 3 * plane + at, ok, 0.0)
        own_scale = tl.load(sums + 4 * plane + at, ok, 0.0)
        tl.store(sums + at, r_sum, ok)
        tl.store(sums + plane + at, q_sum, ok)
        tl.store(sums + 2 * plane + at, r_slope, ok)
        tl.store(sums + 3 * plane + at, q_slope, ok)
        tl.store(sums + 4 * plane + at, scale, ok)
        count = tl.minimum(steps, length - chunk * steps).to(tl.float32)
        top = tl.maximum(tl.ceil(tl.maximum(scale + w * count, own_scale)), never)
        past = tl.exp(scale - top + w * count)
        now = tl.exp(own_scale - top)
        r_slope = past * (r_slope + count * r_sum) + now * own_r_slope
        q_slope = past * (q_slope + count * q_sum) + now * own_q_slope
        r_sum = past * r_sum + now * own_r
        q_sum = past * q_sum + now * own_q
        scale = top
    tl.store(last + here, r_sum, ok)
    tl.store(last + edge + here, q_sum, ok)
    tl.store(last + 2 * edge + here, r_slope, ok)
    tl.store(last + 3 * edge + here, q_slope, ok)
    tl.store(last + 4 * edge + here, scale, ok)
