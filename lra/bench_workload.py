"""What one op's measurement consists of: its size, its inputs and the competitors.

Shapes: B batch, H heads, L sequence length, E head width, C = H E channels, N = B L C elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from attention import kernels
from lra import bench_peers
from lra.bench_peers import Missing

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


def outputs_of(function: Callable, *arguments: object, **options: object) -> tuple[Tensor, ...]:
    """The output of an op, without the end state that some return."""
    result = function(*arguments, **options)
    return (result[0] if isinstance(result, tuple) else result,)


class Builder:
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
        call = partial(outputs_of, run, *self.arguments)
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
