"""What ``lra bench ops`` times: for each op the callables that compete, and what the op cannot avoid.

Shapes: B batch, H heads, L sequence length, E head width, C = H E channels, N = B L C elements.
To add an op, write a builder and put it into ``BUILDERS``; an op that attention.kernels does not export is left out.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention import kernels
from attention.kernels.favor import orthogonal_projection
from lra import bench_peers
from lra.bench_workload import SEED, Builder, Case, Draw, Setting, Workload, outputs_of

STATE_WIDTH = 16
"""States a channel of selective_scan, as in the Mamba paper."""
UNPADDED = "unpadded rows"


def _softmax(setting: Setting) -> Workload:
    """Bytes: q, k, v, out; backward q, k, v and the gradients of the four. FLOPs: 2 products, 5 backward."""
    draw = Draw(setting)
    q, k, v = draw.heads(), draw.heads(), draw.heads()
    builder = Builder("softmax_attention", draw, [q, k, v], q)
    copies = 3 if setting.train else 2
    builder.kernels(2, reference_growth=2, reference_scratch=copies * 4 * setting.pairs)
    flops = (14 if setting.train else 4) * setting.pairs * setting.head_width
    return Workload(builder.op, builder.cases, "reference", _qkv_bytes(setting), flops)


def _qkv_bytes(setting: Setting) -> int:
    return (11 if setting.train else 4) * setting.elements * setting.dtype.itemsize


def _padded(setting: Setting) -> Workload:
    """Rows of unequal length: every padded form against the same real tokens without any padding."""
    draw = Draw(setting)
    q, k, v = draw.heads(), draw.heads(), draw.heads()
    lengths = draw.lengths().tolist()
    mask = (torch.arange(setting.length) < torch.tensor(lengths)[:, None]).to(setting.device)
    options: dict[str, object] = {"key_mask": mask}
    if "skip_masked_queries" in inspect.signature(kernels.softmax_attention).parameters:
        options["skip_masked_queries"] = True
    # the gradient of a padded output is zero, as behind a masked loss
    seed = draw.normal(*q.shape).detach() * mask[:, None, :, None]
    common = {"inputs": [q, k, v], "seeds": [seed], "train": setting.train, "growth": 2}
    cases = []
    for name in kernels.available("softmax_attention", setting.device.type):
        if name != "reference":
            run = partial(outputs_of, kernels.softmax_attention, q, k, v, kernel=name, **options)
            cases.append(Case(f"{name}, key_mask", "kernel", run, **common))
    expanded = mask[:, None, None, :].expand(-1, -1, setting.length, -1).contiguous()
    run = partial(outputs_of, bench_peers.masked_sdpa, q, k, v, expanded)
    scratch = 6 * setting.batch * setting.length**2
    cases.append(Case("SDPA, L x L mask", "baseline", run, scratch=scratch, **common))
    rows = [(row, length) for row, length in enumerate(lengths) if length]
    pieces = [[draw.leaf(x[row : row + 1, :, :length]) for x in (q, k, v)] for row, length in rows]
    seeds = [seed[row : row + 1, :, :length] for row, length in rows]

    def unpadded() -> tuple[Tensor, ...]:
        return tuple(kernels.softmax_attention(*piece) for piece in pieces)

    def real_tokens(outputs: tuple[Tensor, ...]) -> Tensor:
        if len(outputs) == 1 and outputs[0].shape == q.shape:
            outputs = tuple(outputs[0][row : row + 1, :, :length] for row, length in rows)
        return torch.cat([x.flatten() for x in outputs])

    flat = [x for piece in pieces for x in piece]
    cases.append(Case(UNPADDED, "baseline", unpadded, flat, seeds, setting.train, growth=2))
    real = sum(lengths)
    size = (11 if setting.train else 4) * real * setting.heads * setting.head_width * setting.dtype.itemsize
    squares = sum(length**2 for length in lengths) * setting.heads
    flops = (14 if setting.train else 4) * squares * setting.head_width
    remark = f"{real} of {setting.batch * setting.length} tokens are real"
    return Workload("softmax_padded", cases, UNPADDED, size, flops, remark=remark, view=real_tokens)


def _favor(setting: Setting) -> Workload:
    """Bytes as softmax. FLOPs: two projections, keys times values, queries times that; twice as many backward."""
    draw = Draw(setting)
    q, k, v = draw.heads(), draw.heads(), draw.heads()
    features = max(1, int(setting.head_width * math.log(setting.head_width)))
    generator = torch.Generator().manual_seed(SEED)
    projection = orthogonal_projection(features, setting.head_width, generator=generator).to(setting.device)
    builder = Builder("favor_attention", draw, [q, k, v, projection.to(setting.dtype)], q)
    copies = 3 if setting.train else 2
    builder.kernels(reference_growth=2, reference_scratch=copies * 8 * setting.pairs)
    builder.add("plain", "baseline", bench_peers.plain_favor)
    builder.peer()
    flops = (24 if setting.train else 8) * setting.elements * features
    return Workload(builder.op, builder.cases, "plain", _qkv_bytes(setting), flops, builder.missing)


def _linear(setting: Setting) -> Workload:
    """Bytes as softmax. FLOPs: keys times values and queries times that; twice as many backward."""
    draw = Draw(setting)
    q, k, v = draw.heads(), draw.heads(), draw.heads()
    builder = Builder("linear_attention", draw, [q, k, v], q)
    copies = 3 if setting.train else 2
    builder.kernels(reference_growth=2, reference_scratch=copies * 4 * setting.pairs)
    builder.add("plain", "baseline", bench_peers.plain_linear)
    flops = (12 if setting.train else 4) * setting.elements * setting.head_width
    return Workload(builder.op, builder.cases, "plain", _qkv_bytes(setting), flops)


def _plain(names: list[str]) -> str:
    """The plain-torch form among kernels of a scan: the vectorised one where another one is to be judged by it."""
    return "torch" if "torch" in names and names[0] != "torch" else "reference"


def _wkv4(setting: Setting) -> Workload:
    """Bytes: k, v, y; training writes the fp32 log-denominator too and reads k, v, y, it, gy, writes gk, gv."""
    draw = Draw(setting)
    channels = setting.heads * setting.head_width
    time_decay = draw.normal(channels, dtype=torch.float32)
    u = draw.normal(channels, scale=0.5, dtype=torch.float32)
    k, v = (draw.normal(setting.batch, setting.length, channels) for _ in range(2))
    builder = Builder("wkv4", draw, [time_decay, u, k, v], k)
    names = builder.kernels()
    builder.peer(growth=2 if setting.train else 1)
    per_element = 9 * setting.dtype.itemsize + 8 if setting.train else 3 * setting.dtype.itemsize
    size = per_element * setting.elements
    return Workload(builder.op, builder.cases, _plain(names), size, missing=builder.missing)


def _wkv7(setting: Setting) -> Workload:
    """Bytes: six inputs, y; training reads the six and gy again and writes six gradients."""
    draw = Draw(setting)
    shape = (setting.batch, setting.length, setting.heads, setting.head_width)
    r, k, v = (draw.normal(*shape, scale=0.5) for _ in range(3))
    logw = draw.leaf(-0.6 * draw.normal(*shape).detach().sigmoid())  # RWKV-7's own range of decays
    direction = torch.nn.functional.normalize(draw.normal(*shape).detach().float(), dim=-1)
    rate = draw.normal(*shape).detach().float().sigmoid()
    a, b = (draw.leaf(x.to(setting.dtype)) for x in (-direction, direction * rate))
    builder = Builder("wkv7", draw, [r, logw, k, v, a, b], v)
    states = 4 * setting.elements * setting.head_width
    names = builder.kernels(reference_scratch=4 * states if setting.train else 0)
    size = (20 if setting.train else 7) * setting.elements * setting.dtype.itemsize
    return Workload(builder.op, builder.cases, _plain(names), size)


def _selective_scan(setting: Setting) -> Workload:
    """Bytes: u, delta, y ``(B, L, 2C)`` and B, C ``(B, L, 16)``; training reads all but y, gy, writes 4 gradients."""
    draw = Draw(setting)
    width = 2 * setting.heads * setting.head_width
    u = draw.normal(setting.batch, setting.length, width)
    delta = draw.normal(setting.batch, setting.length, width, scale=0.5, shift=-4.0)  # steps of about e^-4
    rates = -torch.arange(1.0, STATE_WIDTH + 1).repeat(width, 1)
    a = draw.leaf(rates.to(setting.device))
    b, c = (draw.normal(setting.batch, setting.length, STATE_WIDTH) for _ in range(2))
    d = draw.leaf(torch.ones(width, device=setting.device))
    builder = Builder("selective_scan", draw, [u, delta, a, b, c, d], u)
    states = 4 * u.numel() * STATE_WIDTH
    names = builder.kernels(reference_scratch=6 * states if setting.train else 0)
    builder.peer(scratch=(8 if setting.train else 5) * states)
    wide, narrow = (8, 6) if setting.train else (3, 2)
    size = (wide * u.numel() + narrow * b.numel()) * setting.dtype.itemsize
    return Workload(builder.op, builder.cases, _plain(names), size, missing=builder.missing)


BUILDERS: dict[str, Callable[[Setting], Workload]] = {
    "softmax_attention": _softmax,
    "softmax_padded": _padded,
    "favor_attention": _favor,
    "linear_attention": _linear,
    "wkv4": _wkv4,
    "wkv7": _wkv7,
    "selective_scan": _selective_scan,
}


def present() -> list[str]:
    """The ops that can be timed: attention.kernels exports what they call."""
    return [op for op in BUILDERS if hasattr(kernels, op) or op == "softmax_padded"]
