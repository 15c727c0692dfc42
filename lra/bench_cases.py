"""What ``lra bench ops`` times: for each op its inputs, the callables that compete, and what the op cannot avoid.

Shapes: B batch, H heads, L sequence length, E head width, C = H E channels, N = B L C elements.
To add an op, write a builder and put it into ``BUILDERS``; an op that attention.kernels does not export is left out.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from attention import kernels
from attention.kernels.favor import orthogonal_projection
from lra import bench_peers
from lra.bench_peers import Missing

STATE_WIDTH = 16
"""States a channel of selective_scan, as in the Mamba paper."""
SEED = 0


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """The size and kind of one measurement."""

    batch: int
    heads: int
    head_width: int
    length: int
    passes: str
    """``train``: forward and backward; ``forward``: without autograd."""
    dtype: torch.dtype
    device: torch.device

    def encode(self) -> str:
        """One word for another process, see ``parse_setting``."""
        dtype = next(name for name, value in DTYPES.items() if value is self.dtype)
        return f"{self.batch},{self.heads},{self.head_width},{self.length},{self.passes},{dtype},{self.device}"

    @property
    def train(self) -> bool:
        return self.passes == "train"

    @property
    def elements(self) -> int:
        """N."""
        return self.batch * self.length * self.heads * self.head_width

    @property
    def pairs(self) -> int:
        """Scores that an L x L form holds."""
        return self.batch * self.heads * self.length**2


def parse_setting(text: str) -> Setting:
    """The ``Setting`` that ``encode`` wrote."""
    *sizes, passes, dtype, device = text.split(",")
    return Setting(*map(int, sizes), passes, DTYPES[dtype], torch.device(device))


@dataclass(frozen=True)
class Case:
    """One competitor. ``run`` returns the outputs, ``inputs`` are what gradients are taken of."""

    name: str
    kind: str
    """``kernel`` of attention.kernels, ``baseline`` written here, or ``peer`` of another package."""
    run: Callable[[], tuple[Tensor, ...]]
    inputs: Sequence[Tensor]
    seeds: Sequence[Tensor]
    """Gradients of the outputs."""
    train: bool
    growth: int = 1
    """Time grows no faster than with L to this power."""
    scratch: int = 0
    """Estimate of the bytes that it holds above its inputs, where that is much."""

    def call(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """One call: outputs and, in training, gradients."""
        if not self.train:
            with torch.no_grad():
                return self.run(), ()
        outputs = self.run()
        return outputs, torch.autograd.grad(outputs, self.inputs, self.seeds)


@dataclass(frozen=True)
class Workload:
    """The competitors of one op at one length, and the least that any of them must move and multiply."""

    op: str
    cases: list[Case]
    plain: str
    """Name of the case that ratios refer to: the same op as one writes it in plain torch."""
    bytes: int
    flops: int | None = None
    """Multiplications and additions of the matrix products, None where there are none."""
    missing: list[Missing] = field(default_factory=list)
    remark: str = ""
    view: Callable[[tuple[Tensor, ...]], Tensor] | None = None
    """What of the outputs must agree where the layouts differ; then gradients are not compared."""


class Draw:
    """Inputs of one setting, the same for every case."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._generator = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """A leaf ``shift + scale N(0, 1)``."""
        values = shift + scale * torch.randn(*shape, generator=self._generator)
        return self.leaf(values.to(self.setting.device, dtype or self.setting.dtype))

    def leaf(self, values: Tensor) -> Tensor:
        return values.detach().requires_grad_(self.setting.train)

    def heads(self) -> Tensor:
        """``(B, H, L, E)``, small enough that random features approximate softmax."""
        s = self.setting
        return self.normal(s.batch, s.heads, s.length, s.head_width, scale=0.5)

    def lengths(self) -> Tensor:
        """Real tokens of each row ``(B)``, uniform in [0, L], at least one token in all."""
        lengths = torch.randint(0, self.setting.length + 1, (self.setting.batch,), generator=self._generator)
        lengths[0] = lengths[0].clamp(min=1)
        return lengths


def _outputs(function: Callable, *arguments: object, **options: object) -> tuple[Tensor, ...]:
    """The output of an op, without the end state that some return."""
    result = function(*arguments, **options)
    return (result[0] if isinstance(result, tuple) else result,)


class _Builder:
    """Collects the cases of one op over common inputs."""

    def __init__(self, op: str, draw: Draw, arguments: list[Tensor], like: Tensor, **options: object) -> None:
        self.op, self.arguments, self.options = op, arguments, options
        self._train, self._device = draw.setting.train, draw.setting.device
        self._inputs = [x for x in arguments if x.requires_grad]
        self._seeds = [draw.normal(*like.shape).detach()]
        self.cases: list[Case] = []
        self.missing: list[Missing] = []

    def add(self, name: str, kind: str, run: Callable, *, growth: int = 1, scratch: int = 0) -> None:
        """One more competitor, called with the common inputs."""
        call = partial(_outputs, run, *self.arguments)
        self.cases.append(Case(name, kind, call, self._inputs, self._seeds, self._train, growth, scratch))

    def kernels(self, growth: int = 1, *, reference_growth: int = 1, reference_scratch: int = 0) -> list[str]:
        """All kernels of the op on this device, best first; their names."""
        names = kernels.available(self.op, self._device.type)
        function = getattr(kernels, self.op)
        for name in names:
            slow = name == "reference"
            self.add(
                name,
                "kernel",
                partial(function, kernel=name, **self.options),
                growth=reference_growth if slow else growth,
                scratch=reference_scratch if slow else 0,
            )
        return names

    def peer(self, growth: int = 1, scratch: int = 0) -> None:
        """The other package's implementation, or a note of why it is absent."""
        name, found = bench_peers.load(self.op)
        if isinstance(found, Missing):
            self.missing.append(found)
        else:
            self.add(name, "peer", found, growth=growth, scratch=scratch)


def _softmax(setting: Setting) -> Workload:
    """Bytes: q, k, v, out; backward q, k, v and the gradients of the four. FLOPs: 2 products, 5 backward."""
    draw = Draw(setting)
    q, k, v = draw.heads(), draw.heads(), draw.heads()
    builder = _Builder("softmax_attention", draw, [q, k, v], q)
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
            run = partial(_outputs, kernels.softmax_attention, q, k, v, kernel=name, **options)
            cases.append(Case(f"{name}, key_mask", "kernel", run, **common))
    expanded = mask[:, None, None, :].expand(-1, -1, setting.length, -1).contiguous()
    run = partial(_outputs, bench_peers.masked_sdpa, q, k, v, expanded)
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


UNPADDED = "unpadded rows"


def _favor(setting: Setting) -> Workload:
    """Bytes as softmax. FLOPs: two projections, keys times values, queries times that; twice as many backward."""
    draw = Draw(setting)
    q, k, v = draw.heads(), draw.heads(), draw.heads()
    features = max(1, int(setting.head_width * math.log(setting.head_width)))
    generator = torch.Generator().manual_seed(SEED)
    projection = orthogonal_projection(features, setting.head_width, generator=generator).to(setting.device)
    builder = _Builder("favor_attention", draw, [q, k, v, projection.to(setting.dtype)], q)
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
    builder = _Builder("linear_attention", draw, [q, k, v], q)
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
    builder = _Builder("wkv4", draw, [time_decay, u, k, v], k)
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
    builder = _Builder("wkv7", draw, [r, logw, k, v, a, b], v)
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
    builder = _Builder("selective_scan", draw, [u, delta, a, b, c, d], u)
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
