"""What ``scripts/gpu_check`` times: every op with every kernel, and the peers that are installed.

Shapes: B batch, H heads, L sequence length, E head width, C = H * E channels, M random features, N states a channel.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attention import kernels
from attention.kernels.favor import orthogonal_projection
from attention.kernels.flops import COSTS

STATES = 16
"""N of the selective scan, as published."""
LONGEST_LOOP = 512
"""Token by token, a call takes seconds beyond this length."""


@dataclass(frozen=True)
class Size:
    """One input size."""

    batch: int
    heads: int
    length: int
    width: int
    features: int = 256

    @property
    def tokens(self) -> int:
        return self.batch * self.length


CUDA_SIZES = [Size(32, 8, 512, 64), Size(32, 8, 2048, 64), Size(4, 8, 16384, 64)]
CPU_SIZES = [Size(2, 2, 16, 8, features=8)]
LIMIT_GIB = 16
"""A case whose L x L weights would take more is skipped."""


@dataclass(frozen=True)
class Case:
    """An op with one kernel at one size."""

    op: str
    kernel: str
    size: Size
    padded: bool
    run: Callable[..., Tensor]
    inputs: list[Tensor]
    flops: float
    """Of the forward pass."""


def cases(size: Size, device: str, dtype: torch.dtype) -> list[Case]:
    """Every op with every kernel that is available, and the peers that can be imported."""
    shape = (size.batch, size.heads, size.length, size.width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    ends = torch.linspace(0, size.length, size.batch + 1, device=device)[1:, None]
    mask = torch.arange(size.length, device=device) < ends  # lengths uniform in (0, L]
    projection = orthogonal_projection(size.features, size.width, generator=torch.Generator().manual_seed(0)).to(device)
    dot = 4.0 * size.batch * size.heads * size.length * size.width
    found = []
    for op in ("softmax_attention", "favor_attention", "linear_attention"):
        for kernel in kernels.available(op, device):
            heavy = kernel == "reference" and size.batch * size.heads * size.length**2 * 4 > LIMIT_GIB * 2**30
            for padded in () if heavy else (False, True):
                options = {"key_mask": mask if padded else None, "kernel": kernel}
                if op == "softmax_attention":
                    options["skip_masked_queries"] = padded
                extra = [projection] if op == "favor_attention" else []
                inner = {"softmax_attention": size.length, "favor_attention": 2 * size.features}.get(op, size.width)
                function = getattr(kernels, op)
                run = lambda *x, f=function, e=extra, o=options: f(*x, *e, **o)  # noqa: E731
                found.append(Case(op, kernel, size, padded, run, [q, k, v], dot * inner))
    return found + recurrences(size, device, dtype) + peers(size, [q, k, v], dot)


def recurrences(size: Size, device: str, dtype: torch.dtype) -> list[Case]:
    """The ops with a state; inputs as the mixers make them, what they keep in fp32 in fp32."""
    batch, length, channels = size.batch, size.length, size.heads * size.width

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device).to(kind)

    def heads() -> Tensor:
        return draw(batch, length, size.heads, size.width)

    kappa = normalize(heads().float(), dim=-1)
    rate, logw = torch.sigmoid(heads().float()), -0.6 * torch.sigmoid(heads().float())
    decay, bonus = torch.linspace(-5, 3, channels, device=device), torch.zeros(channels, device=device)
    A = -torch.arange(1.0, STATES + 1, device=device).repeat(channels, 1)
    D, delta_bias = torch.ones(channels, device=device), torch.full((channels,), -4.0, device=device)
    u, delta, z = (draw(batch, length, channels) for _ in range(3))
    B, C = (draw(batch, length, STATES) for _ in range(2))
    inputs = {
        "wkv4": [decay, bonus, draw(batch, length, channels), draw(batch, length, channels)],
        "wkv7": [heads(), logw, heads(), heads(), (-kappa).to(dtype), (kappa * rate).to(dtype)],
        "selective_scan": [delta, A, B, C, D, z, delta_bias, u],  # the output is taken to be as large as the last
    }
    scan = lambda *x, **o: kernels.selective_scan(x[-1], *x[:5], z=x[5], delta_bias=x[6], **o)  # noqa: E731
    functions = {"wkv4": kernels.wkv4, "wkv7": kernels.wkv7, "selective_scan": scan}
    costs = {op: COSTS[op](*tensors).forward for op, tensors in inputs.items() if op != "selective_scan"}
    costs["selective_scan"] = COSTS["selective_scan"](u, delta, A, B, C, D).forward
    found = []
    for op, tensors in inputs.items():
        leaves = [x.requires_grad_() for x in tensors]
        for kernel in kernels.available(op, device):
            if kernel != "reference" or length <= LONGEST_LOOP:
                run = lambda *x, f=functions[op], n=kernel: f(*x, kernel=n)[0]  # noqa: E731
                found.append(Case(op, kernel, size, False, run, leaves, costs[op]))
    return found


def peers(size: Size, qkv: list[Tensor], dot: float) -> list[Case]:
    """Libraries that happen to be installed; the project needs none of them."""
    found = []
    if importlib.util.find_spec("performer_pytorch"):
        from performer_pytorch import FastAttention

        fast = FastAttention(size.width, nb_features=size.features).to(qkv[0])
        found.append(Case("favor_attention", "performer-pytorch", size, False, fast, qkv, dot * 2 * size.features))
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_func

        run = lambda *x: flash_attn_func(*(part.transpose(1, 2) for part in x))  # noqa: E731
        found.append(Case("softmax_attention", "flash-attn", size, False, run, qkv, dot * size.length))
    return found
