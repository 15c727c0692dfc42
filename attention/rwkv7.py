"""RWKV-7: time-mix (a delta-rule state with learned decay and rate) as the mixer, channel-mix as its feed-forward.

Shapes: B batch, L sequence length, D model width, H heads of a direction, E head width, C = H * E channels of a
direction (D, or D / 2 if bidirectional), R rank of a low-rank map.

Peng et al. 2025, "RWKV-7 Goose with expressive dynamic state evolution" (arXiv 2503.14456), section 4; initial
values as in BlinkDL/RWKV-LM, RWKV-v7. Left out: the residual from the first layer's values to the later ones'
(its gate would add a low-rank map a layer), as a mixer sees nothing of other layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention.base import Mixer, MixerConfig, check_heads, check_token, check_tokens
from attention.kernels.wkv7 import initial_state, wkv7, wkv7_step
from attention.rwkv import ChannelMix, shift, zero_hidden

SLOWEST = -math.exp(-0.5)
"""The strongest decay is e^-0.607 a step: what is forgotten faster is the rate's business."""


@dataclass
class RWKV7Config(MixerConfig):
    """Options of ``rwkv7``."""

    name: str = "rwkv7"
    num_heads: int = 1
    """Heads of both directions together; must divide the model width. Bidirectional: an even number."""


class RWKV7(Mixer):
    """RWKV-7 time-mix, ``(B, L, D) -> (B, L, D)``; ``Direction`` has the formulas.

    Bidirectional (``causal=False``): half of the heads scan forwards, half backwards, each half with shifts,
    low-rank maps and D x D/2 projections of its own, joined before the output projection. A model of one head
    has one of width D/2 for each direction. The backward half reads x_{t+1} where the forward half reads
    x_{t-1}. Either way 4 D^2 weights for r, k, v and output, like the q, k, v, o of the other mixers, and a
    direction adds (D + C) R for each of decay, rate and gate, 6 D for shifts and 7 C for biases, keys and norm.

    Masked positions count as the zeros beyond a sequence's ends and leave the state alone, so that a row gives
    the same alone and padded, in both directions; any mask will do: padding left or right, or holes.

    The output weights start at zero, as published: the block is the identity until an update.
    """

    Config = RWKV7Config
    op = "wkv7"
    streaming = True

    def __init__(self, config: RWKV7Config, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__()
        check_heads(width, config.num_heads)
        channels, heads = width, config.num_heads
        if not config.causal:
            channels, heads = width // 2, max(heads // 2, 1)
            if width % 2 or (config.num_heads % 2 and config.num_heads > 1):
                raise ValueError(
                    f"a bidirectional attention=rwkv7 gives each direction half of model.width={width} and of "
                    f"model.num_heads={config.num_heads}; make both even or set attention.causal=true"
                )
        self.config, self.width, self.layer, self.num_layers = config, width, layer, num_layers
        self.forwards = Direction(width, channels, heads, layer=layer, num_layers=num_layers)
        if not config.causal:
            self.backwards = Direction(width, channels, heads, layer=layer, num_layers=num_layers)
        self.output = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """``x (B, L, D)``, ``key_mask`` bool ``(B, L)`` -> ``(B, L, D)``."""
        check_tokens(x, key_mask, self.output.weight)
        x = zero_hidden(x, key_mask)
        kernel = self.config.kernel
        y = self.forwards(x, shift(x, 1), key_mask, kernel)
        if not self.config.causal:
            # masked positions are zeros to the shift and nothing to the scan: a plain flip will do
            mirrored = None if key_mask is None else key_mask.flip(1)
            back = self.backwards(x.flip(1), shift(x, -1).flip(1), mirrored, kernel)
            y = torch.cat([y, back.flip(1)], -1)
        return self.output(y)

    def native_channel_mixer(self) -> nn.Module:
        """The channel-mix of this layer; it shifts in the directions in which this mixer looks."""
        causal = self.config.causal
        return ChannelMix7(self.width, layer=self.layer, num_layers=self.num_layers, causal=causal)

    def init_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """What ``step`` needs before the first token: the last input ``(B, D)`` and the state ``(B, H, E, E)``."""
        self._check_streaming()
        weight, heads = self.output.weight, self.forwards.heads
        head_width = self.width // heads
        sums = initial_state(batch_size, heads, head_width, head_width, device=weight.device, dtype=weight.dtype)
        return weight.new_zeros(batch_size, self.width), sums

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One token of the causal form: ``x (B, D)`` -> ``(B, D)`` and the next state."""
        self._check_streaming()
        check_token(x, self.output.weight)
        last, sums = state
        y, sums = self.forwards.step(x, last, sums)
        return self.output(y), (x, sums)

    def _check_streaming(self) -> None:
        if not self.config.causal:
            raise ValueError("a bidirectional attention=rwkv7 cannot stream; set attention.causal=true")


class Direction(nn.Module):
    """RWKV-7 time-mix in one direction before the output projection, ``(B, L, D) -> (B, L, C)``.

    x_c = x + mix_c (x_{t-1} - x) for each c of r, w, k, v, a, g; then

        logw = -e^{-1/2} sigmoid(w0 + tanh(x_w W1) W2)     rate = sigmoid(a0 + x_a A1 A2)
        kappa = unit(k * kappa_scale) a head               k' = k (1 + (rate - 1) rate_scale)
        y = wkv7(r, logw, k', v, -kappa, kappa * rate)
        out = (norm(y) + (r . k' * bonus) v) * (sigmoid(x_g G1) G2),   norm and r . k' a head
    """

    def __init__(self, width: int, channels: int, heads: int, *, layer: int, num_layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Parameter(_initial_mix(width, layer, num_layers))
        depth = layer / max(num_layers - 1, 1)
        along, within = _ramps(channels, heads)
        # in layer 0 a step decays by e^-0.0002 in the slowest channel, by e^-0.58 in the fastest
        decay_bias = -5.5 + 6 * (along + 0.5) ** (1 + depth**0.3) + 2.5 * within
        small, large = _rank(2.5, width, channels), _rank(5, width, channels)
        self.decay = LowRank(width, small, channels, torch.tanh, bias=decay_bias)
        self.rate = LowRank(width, small, channels, nn.Identity(), bias=-0.19 + 0.3 * within + 0.4 * along)
        self.gate = LowRank(width, large, channels, torch.sigmoid)
        self.kappa_scale = nn.Parameter(0.71 - 0.1 * along)
        self.rate_scale = nn.Parameter(torch.full((channels,), 1.02))
        self.bonus = nn.Parameter(torch.full((heads, channels // heads), -0.04))
        self.receptance = nn.Linear(width, channels, bias=False)
        self.key = nn.Linear(width, channels, bias=False)
        self.value = nn.Linear(width, channels, bias=False)
        for projection, bound in ((self.receptance, 0.5), (self.key, 0.05), (self.value, 0.5)):
            nn.init.uniform_(projection.weight, -bound * width**-0.5, bound * width**-0.5)
        # the published 6.4e-4 of heads of width 64, larger than usual: a young state reads close to zero
        self.norm = nn.GroupNorm(heads, channels, eps=1e-5 * channels / heads)

    def project(self, x: Tensor, last: Tensor, key_mask: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """The arguments of ``wkv7 (..., H, E)`` and the gate ``(..., C)``; ``x, last (..., D)``."""
        change = last - x
        x_r, x_w, x_k, x_v, x_a, x_g = (torch.addcmul(x, change, mix) for mix in self.mix.to(x.dtype))
        logw = SLOWEST * torch.sigmoid(self.decay(x_w).float())
        rate = torch.sigmoid(self.rate(x_a))
        k = self.key(x_k)
        kappa = nn.functional.normalize((k * self.kappa_scale).unflatten(-1, (self.heads, -1)), dim=-1).flatten(-2)
        k = k * (1 + (rate - 1) * self.rate_scale)
        v = self.value(x_v)
        if key_mask is not None:
            hidden = ~key_mask[..., None]
            logw, k, v, kappa = (part.masked_fill(hidden, 0) for part in (logw, k, v, kappa))
        parts = (self.receptance(x_r), logw, k, v, -kappa, kappa * rate)
        return [part.unflatten(-1, (self.heads, -1)) for part in parts], self.gate(x_g)

    def forward(self, x: Tensor, last: Tensor, key_mask: Tensor | None, kernel: str) -> Tensor:
        """``x, last (B, L, D)`` -> ``(B, L, C)``."""
        parts, gate = self.project(x, last, key_mask)
        y, _ = wkv7(*parts, kernel=kernel)
        return self._finish(y, parts, gate)

    def step(self, x: Tensor, last: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``x, last (B, D)`` -> ``(B, C)`` and the next state."""
        parts, gate = self.project(x, last)
        y, state = wkv7_step(*parts, state)
        return self._finish(y.to(gate.dtype), parts, gate), state

    def _finish(self, y: Tensor, parts: list[Tensor], gate: Tensor) -> Tensor:
        """Norm, bonus of the current token, gate: ``y (..., H, E)`` -> ``(..., C)``."""
        r, _, k, v, _, _ = parts
        lead = y.shape[:-2]
        y = self.norm(y.reshape(lead.numel(), gate.shape[-1])).view(gate.shape)
        bonus = (r * k * self.bonus).sum(-1, keepdim=True) * v
        return (y + bonus.flatten(-2)) * gate


class LowRank(nn.Module):
    """``bias + act(x down) up``, ``(..., D) -> (..., C)``; starts at its bias."""

    def __init__(
        self, width: int, rank: int, channels: int, act: Callable[[Tensor], Tensor], bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.act = act
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, channels, bias=bias is not None)
        nn.init.zeros_(self.down.weight)
        nn.init.orthogonal_(self.up.weight, gain=0.1 * max(1, rank / channels) ** 0.5)
        if bias is not None:
            self.up.bias.data.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.act(self.down(x)))


class ChannelMix7(ChannelMix):
    """RWKV-7 channel-mix: ``Wv relu(Wk xk)^2``, without RWKV-4's gate. 8 D^2 weights."""

    def __init__(self, width: int, *, layer: int, num_layers: int, causal: bool) -> None:
        super().__init__(width, causal=causal)
        self.mix = nn.Parameter(1 - (torch.arange(width) / width) ** ((1 - layer / num_layers) ** 4))
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)
        nn.init.uniform_(self.key.weight, -0.5 * width**-0.5, 0.5 * width**-0.5)
        nn.init.zeros_(self.value.weight)

    def combine(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.value(torch.relu(self.key(torch.addcmul(x, beside - x, self.mix.to(x.dtype)))).square())


def _initial_mix(width: int, layer: int, num_layers: int) -> Tensor:
    """Share of the token before, ``(6, D)`` for r, w, k, v, a, g: less in later channels, sooner so in later layers."""
    rank = torch.arange(width) / width
    rest = 1 - layer / num_layers
    powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2]) * rest
    return 1 - rank ** powers[:, None]


def _ramps(channels: int, heads: int) -> tuple[Tensor, Tensor]:
    """From -1/2 to 1/2 along all channels, and from -1 to 1 within each head as x |x|; both ``(C)``."""
    along = torch.arange(channels) / max(channels - 1, 1) - 0.5
    within = torch.linspace(-1, 1, channels // heads) if channels > heads else torch.zeros(1)
    return along, (within * within.abs()).repeat(heads)


def _rank(factor: float, width: int, channels: int) -> int:
    """Rank of a low-rank map: factor sqrt(D) as published, halved with the channels.

    To the next multiple of 8; the published 32, at least 32, would outgrow the 4 D^2 at the widths of LRA.
    """
    return max(8, 8 * round(factor * channels * width**-0.5 / 8))
