"""Mamba: a gated selective scan behind a short convolution.

Shapes: B batch, L sequence length, D model width, C inner channels of a direction (expand D, or half of that if
bidirectional), N states a channel, R rank of the step size, K taps of the convolution.

Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", figure 3 and section 3.6 (real
diagonal A starting at -1..-N, step sizes starting log-uniform in [0.001, 0.1]).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from attention.base import Mixer, MixerConfig, check_token, check_tokens
from attention.kernels.selective_scan import selective_scan

STEP_SIZES = (1e-3, 1e-1)
"""Range of the step sizes dt at the start."""


@dataclass
class MambaConfig(MixerConfig):
    """Defaults as published."""

    name: str = "mamba"
    state_size: int = 16
    """States N a channel."""
    conv_width: int = 4
    """Taps K of the convolution before the scan."""
    expand: int = 2
    """Inner channels per model channel."""


class Mamba(Mixer):
    """Mamba block without its norm and residual, ``(B, L, D) -> (B, L, D)``.

    Bidirectional (``causal=False``): half of the inner channels scan forwards, half backwards, each half with
    weights of its own, joined before the output projection. Either way, with E = expand D inner channels and
    R = ceil(D / 16), there are 3 D E weights in the projections in and out and E (2 R + 2 N + N + K + 3) in the scan:
    about 6.25 D^2 + 110 D by default, against 4 D^2 of the mixers with q, k, v, o.

    Masked positions count as the zeros beyond a sequence's ends, so that a row gives the same alone and padded, in
    both directions; any mask will do: padding left or right, or holes. To the convolution they are zeros, and to the
    scan a step of size 0, which leaves the state exactly as it was.
    """

    Config = MambaConfig
    op = "selective_scan"
    streaming = True

    def __init__(self, config: MambaConfig, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__()
        _check(config, width)
        self.config = config
        inner = config.expand * width
        channels = inner if config.causal else inner // 2
        self.forwards = Direction(config, width, channels)
        if not config.causal:
            self.backwards = Direction(config, width, channels)
        self.output = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """``x (B, L, D)``, ``key_mask`` bool ``(B, L)`` -> ``(B, L, D)``."""
        check_tokens(x, key_mask, self.output.weight)
        hidden = None if key_mask is None else ~key_mask[..., None]
        if hidden is not None:
            x = x.masked_fill(hidden, 0)
        y = self.forwards(x, hidden)
        if not self.config.causal:
            # masked positions are nothing to convolution and scan: a plain flip will do
            back = self.backwards(x.flip(1), None if hidden is None else hidden.flip(1))
            y = torch.cat([y, back.flip(1)], -1)
        return self.output(y)

    def native_channel_mixer(self) -> nn.Module:
        """Nothing: Mamba's own network has no feed-forward between its blocks."""
        return Nothing()

    def init_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """What ``step`` needs before the first token: the last K - 1 inputs of the convolution and h."""
        self._check_causal()
        return self.forwards.init_state(batch_size)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One token of the causal form: ``x (B, D)`` -> ``(B, D)`` and the next state."""
        self._check_causal()
        check_token(x, self.output.weight)
        y, state = self.forwards.step(x, state)
        return self.output(y), state

    def _check_causal(self) -> None:
        if not self.config.causal:
            raise ValueError("a bidirectional attention=mamba cannot stream; set attention.causal=true")


class Direction(nn.Module):
    """Gated selective scan in one direction before the output projection, ``(B, L, D) -> (B, L, C)``."""

    def __init__(self, config: MambaConfig, width: int, channels: int) -> None:
        super().__init__()
        self.kernel, self.states, self.rank = config.kernel, config.state_size, math.ceil(width / 16)
        self.input = nn.Linear(width, channels, bias=False)
        self.gate = nn.Linear(width, channels, bias=False)
        bound = config.conv_width**-0.5
        self.conv_weight = nn.Parameter(torch.empty(config.conv_width, channels).uniform_(-bound, bound))
        self.conv_bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))
        self.select = nn.Linear(channels, self.rank + 2 * self.states, bias=False)
        self.step_size = nn.Linear(self.rank, channels)
        nn.init.uniform_(self.step_size.weight, -(self.rank**-0.5), self.rank**-0.5)
        low, high = (math.log(size) for size in STEP_SIZES)
        dt = torch.empty(channels).uniform_(low, high).exp()
        self.step_size.bias.data = dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
        self.A_log = nn.Parameter(torch.arange(1.0, self.states + 1).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """``x (B, L, D)``, zero where ``hidden (B, L, 1)`` -> ``(B, L, C)``."""
        before = pad(self.input(x), (0, 0, len(self.conv_weight) - 1, 0))
        y, _ = self._scan(self._convolve(before), self.gate(x), hidden, None)
        return y

    def init_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution ``(B, K - 1, C)`` and h ``(B, C, N)``, before the first token."""
        taps, channels = self.conv_weight.shape
        dtype = torch.promote_types(self.A_log.dtype, torch.float32)
        window = self.conv_weight.new_zeros(batch_size, taps - 1, channels)
        return window, self.A_log.new_zeros(batch_size, channels, self.states, dtype=dtype)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``x (B, D)`` -> ``(B, C)`` and the next state."""
        last, h = state
        x = x[:, None]
        window = torch.cat([last, self.input(x)], 1)
        y, h = self._scan(self._convolve(window), self.gate(x), None, h)
        return y[:, 0], (window[:, 1:], h)

    def _convolve(self, x: Tensor) -> Tensor:
        """SiLU of the depthwise convolution: ``x (B, K - 1 + L, C)`` -> ``(B, L, C)``, tap K - 1 on the present."""
        length = x.shape[1] - len(self.conv_weight) + 1
        y = self.conv_bias.to(x.dtype)
        for tap, weight in enumerate(self.conv_weight.to(x.dtype)):
            y = torch.addcmul(y, x[:, tap : tap + length], weight)
        return silu(y)

    def _scan(self, u: Tensor, z: Tensor, hidden: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """``u, z (B, L, C)`` -> ``y (B, L, C)``, and h after it."""
        if hidden is not None:
            # the convolution reaches over the end of a row, and its bias everywhere
            u = u.masked_fill(hidden, 0)
        rank, B, C = self.select(u).split([self.rank, self.states, self.states], -1)
        delta = nn.functional.linear(rank, self.step_size.weight)
        if hidden is not None:
            delta = delta.masked_fill(hidden, -torch.inf)
        options = {"z": z, "delta_bias": self.step_size.bias, "state": state, "kernel": self.kernel}
        return selective_scan(u, delta, -self.A_log.exp(), B, C, self.D, **options)


class Nothing(nn.Module):
    """A channel mixer that adds nothing to the residual."""

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Zeros like ``x``."""
        return torch.zeros_like(x)


def _check(config: MambaConfig, width: int) -> None:
    for key in ("state_size", "conv_width", "expand"):
        if getattr(config, key) < 1:
            raise ValueError(f"attention.{key}={getattr(config, key)} is too small; give at least 1")
    if not config.causal and config.expand * width % 2:
        raise ValueError(
            f"attention.expand={config.expand} times model.width={width} is odd, but a bidirectional attention=mamba "
            f"gives each direction half; make one of them even or set attention.causal=true"
        )
