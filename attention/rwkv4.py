"""RWKV-4: time-mix (a gated decaying average) as the mixer, channel-mix as its own feed-forward.

Shapes: B batch, L sequence length, D model width, C channels of a direction (D, or D / 2 if bidirectional).

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", eqs. 11 to 18; initial values as in its
appendices on small initialisation and time decay.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention.base import Mixer, MixerConfig, check_token, check_tokens
from attention.kernels.wkv4 import State, initial_state, wkv4, wkv4_step
from attention.rwkv import ChannelMix, shift, zero_hidden


@dataclass
class RWKV4Config(MixerConfig):
    """Nothing to choose beyond what every mixer has."""

    name: str = "rwkv4"


class RWKV4(Mixer):
    """RWKV-4 time-mix, ``(B, L, D) -> (B, L, D)``: ``Wo (sigmoid(r) * wkv4(k, v))``.

    Bidirectional (``causal=False``): half of the channels scan forwards, half backwards, each half with
    shift, decay, bonus and D x D/2 projections of its own, joined before the output projection. The backward
    half reads x_{t+1} where the forward half reads x_{t-1}. Either way 4 D^2 weights without bias, like the
    q, k, v, o of the other mixers, and 5 D (causal) or 8 D (bidirectional) for shifts, decays and bonuses.

    Masked positions count as the zeros beyond a sequence's ends, so that a row gives the same alone and
    padded, in both directions; any mask will do: padding left or right, or holes.

    Key, gate and output weights start at zero, as published: the block is the identity until an update.
    """

    Config = RWKV4Config
    op = "wkv4"
    streaming = True

    def __init__(self, config: RWKV4Config, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__()
        if not config.causal and width % 2:
            raise ValueError(
                f"model.width={width} is odd, but a bidirectional attention=rwkv4 gives each direction half; "
                f"use an even width or attention.causal=true"
            )
        self.config, self.width, self.layer, self.num_layers = config, width, layer, num_layers
        channels = width if config.causal else width // 2
        self.forwards = Direction(width, channels, layer=layer, num_layers=num_layers)
        if not config.causal:
            self.backwards = Direction(width, channels, layer=layer, num_layers=num_layers)
        self.output = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """``x (B, L, D)``, ``key_mask`` bool ``(B, L)`` -> ``(B, L, D)``."""
        check_tokens(x, key_mask, self.output.weight)
        x = zero_hidden(x, key_mask)
        kernel = self.config.kernel
        y = self.forwards(x, shift(x, 1), key_mask, kernel)
        if not self.config.causal:
            back = self.backwards(x, shift(x, -1), key_mask, kernel, reverse=True)
            y = torch.cat([y, back], -1)
        return self.output(y)

    def native_channel_mixer(self) -> nn.Module:
        """The channel-mix of this layer; it shifts in the directions in which this mixer looks."""
        causal = self.config.causal
        return ChannelMix4(self.width, layer=self.layer, num_layers=self.num_layers, causal=causal)

    def init_state(self, batch_size: int) -> tuple[Tensor, State]:
        """What ``step`` needs before the first token: the last input ``(B, D)`` and the WKV state."""
        if not self.config.causal:
            raise ValueError("a bidirectional attention=rwkv4 cannot stream; set attention.causal=true")
        weight = self.output.weight
        last = weight.new_zeros(batch_size, self.width)
        return last, initial_state(batch_size, self.width, device=weight.device, dtype=weight.dtype)

    def step(self, x: Tensor, state: tuple[Tensor, State]) -> tuple[Tensor, tuple[Tensor, State]]:
        """One token of the causal form: ``x (B, D)`` -> ``(B, D)`` and the next state."""
        if not self.config.causal:
            raise ValueError("a bidirectional attention=rwkv4 cannot stream; set attention.causal=true")
        check_token(x, self.output.weight)
        last, sums = state
        y, sums = self.forwards.step(x, last, sums)
        return self.output(y), (x, sums)


class Direction(nn.Module):
    """Gated WKV average in one direction before the output projection, ``(B, L, D) -> (B, L, C)``."""

    def __init__(self, width: int, channels: int, *, layer: int, num_layers: int) -> None:
        super().__init__()
        depth = layer / max(num_layers - 1, 1)
        rank = torch.arange(width) / width
        mix = rank ** (1 - layer / num_layers)
        self.mix_key = nn.Parameter(mix)
        self.mix_value = nn.Parameter(mix + 0.3 * depth)
        self.mix_gate = nn.Parameter(mix.sqrt())
        channel = torch.arange(channels)
        speed = channel / max(channels - 1, 1)
        # a step decays by e^-0.0067 in the slowest channel, by e^-20 in the fastest
        self.time_decay = nn.Parameter(-5 + 8 * speed ** (0.7 + 1.3 * depth))
        # neighbouring channels start apart in how much the current token counts
        self.bonus = nn.Parameter(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        self.key = nn.Linear(width, channels, bias=False)
        self.value = nn.Linear(width, channels, bias=False)
        self.gate = nn.Linear(width, channels, bias=False)
        nn.init.zeros_(self.key.weight)
        nn.init.orthogonal_(self.value.weight)
        nn.init.zeros_(self.gate.weight)

    def project(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key, value and gate ``(..., C)`` from the tokens ``x (..., D)`` and those before them."""
        k = self.key(_blend(last, x, self.mix_key))
        v = self.value(_blend(last, x, self.mix_value))
        return k, v, torch.sigmoid(self.gate(_blend(last, x, self.mix_gate)))

    def forward(
        self, x: Tensor, last: Tensor, key_mask: Tensor | None, kernel: str, *, reverse: bool = False
    ) -> Tensor:
        """``x, last (B, L, D)`` -> ``(B, L, C)``; with ``reverse`` the last token is the first to be seen."""
        k, v, gate = self.project(x, last)
        y, _ = wkv4(self.time_decay, self.bonus, k, v, key_mask=key_mask, reverse=reverse, kernel=kernel)
        return gate * y

    def step(self, x: Tensor, last: Tensor, state: State) -> tuple[Tensor, State]:
        """``x, last (B, D)`` -> ``(B, C)`` and the next state."""
        k, v, gate = self.project(x, last)
        y, state = wkv4_step(-self.time_decay.exp(), self.bonus, k, v, state)
        return gate * y.to(gate.dtype), state


class ChannelMix4(ChannelMix):
    """RWKV-4 channel-mix: ``sigmoid(Wr xr) * Wv relu(Wk xk)^2`` (eqs. 17, 18). 9 D^2 weights."""

    def __init__(self, width: int, *, layer: int, num_layers: int, causal: bool) -> None:
        super().__init__(width, causal=causal)
        rank = torch.arange(width) / width
        mix = rank ** (1 - layer / num_layers)
        self.mix_key = nn.Parameter(mix)
        self.mix_gate = nn.Parameter(mix.clone())
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.key.weight, gain=2)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.gate.weight)

    def combine(self, x: Tensor, beside: Tensor) -> Tensor:
        hidden = torch.relu(self.key(_blend(beside, x, self.mix_key))).square()
        return torch.sigmoid(self.gate(_blend(beside, x, self.mix_gate))) * self.value(hidden)


def _blend(beside: Tensor, x: Tensor, mix: Tensor) -> Tensor:
    """``mix x + (1 - mix) beside``, in the dtype of x, which autocast may have narrowed."""
    return torch.lerp(beside, x, mix.to(x.dtype))
