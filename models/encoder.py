"""The encoder around a token mixer: embed, add positions, pre-norm blocks, pool.

Shapes: B batch, L sequence length, D model width, M outputs a row.

Everything but the mixer is the same for every backend. The encoder never asks which mixer it holds.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attention
from attention.base import MixerConfig
from models.heads import INTERACTIONS

POOLINGS = ("mean", "cls", "last")
POSITIONS = ("learned", "sinusoidal", "none")
BLOCKS = ("uniform", "native")
SMALL_MATRIX = 2**20
WIDTHS = (("ffn_width", 2**18), ("match_ffn_width", 2**18))


@dataclass
class EncoderConfig:
    """Shape of the network."""

    num_layers: int = 2
    width: int = 64
    """Model width D."""
    num_heads: int = 2
    """Heads of the mixers that have heads."""
    ffn_width: int = 128
    dropout: float = 0.1
    """On embeddings and residual branches; attention probabilities are never dropped (linear mixers have none)."""
    pooling: str = "mean"
    """``mean`` over real tokens, a prepended learned ``cls`` vector (LRA), or the ``last`` real token."""
    positions: str = "learned"
    """``learned`` table, ``sinusoidal`` (LRA) or ``none``."""
    block: str = "uniform"
    """``uniform``: the same FFN after every mixer. ``native``: the mixer's own channel mixer where it has one."""
    match: str = ""
    """Name of a mixer: ``ffn_width`` then follows, so that a block has the parameters of one around that mixer."""
    match_ffn_width: int = 128
    """FFN width of that other block."""
    interaction: str = "nli"
    """How two documents are compared: ``nli`` by a, b, a * b, a - b (the LRA paper), ``none`` by a and b (its code)."""

    def validate(self) -> None:
        """Raise ``ValueError`` naming the key that does not fit."""
        for key, high in (("num_layers", 1000), ("width", 2**16), ("num_heads", 2**16), *WIDTHS):
            if not 1 <= getattr(self, key) <= high:
                raise ValueError(f"model.{key}={getattr(self, key)} is out of range; give 1 ... {high}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout={self.dropout} is no probability; give a number in [0, 1)")
        if self.match and self.match not in attention.REGISTRY:
            raise ValueError(f"model.match={self.match!r} is unknown; choose {' | '.join(attention.REGISTRY)}")
        choices_of = {"pooling": POOLINGS, "positions": POSITIONS, "block": BLOCKS, "interaction": INTERACTIONS}
        for key, choices in choices_of.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"model.{key}={getattr(self, key)!r} is unknown; choose {' | '.join(choices)}")


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Fixed position table ``(L, D)`` of Vaswani et al. 2017, section 3.5; an odd width drops the last cosine."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    table = torch.stack((torch.sin(position * frequency), torch.cos(position * frequency)), dim=-1)
    return table.flatten(1)[:, :width]


class FeedForward(nn.Module):
    """Position-wise GELU MLP, ``(B, L, D) -> (B, L, D)``; takes the mask for symmetry with channel mixers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.contract(nn.functional.gelu(self.expand(x)))


def not_kept(config: EncoderConfig) -> AbstractContextManager:
    """Where a block of ``config`` is built to be checked or counted, and thrown away; leaves the generator as it was.

    On the meta device weights take no memory, whatever the width. But drawing them there imports torch's compiler,
    three seconds that every command would spend, so small ones are drawn on the CPU.
    """
    small = config.width * max(config.width, config.ffn_width) <= SMALL_MATRIX
    return torch.random.fork_rng(devices=[]) if small else torch.device("meta")


def matched_ffn_width(config: EncoderConfig, mixer_config: MixerConfig) -> int:
    """The FFN width with which a block has the parameters of one around ``config.match``, ``config.match_ffn_width``.

    ``ValueError`` if the mixer alone has more.
    """

    def parameters(mixer: MixerConfig) -> int:
        with not_kept(config):
            built = attention.build(mixer, config.width, layer=0, num_layers=config.num_layers)
        return sum(p.numel() for p in built.parameters())

    if config.block != "uniform":
        raise ValueError("model.match needs model.block=uniform: a native channel mixer has a width of its own")
    reference = attention.load(config.match).Config(name=config.match)
    # two matrices, the hidden bias; the outer bias is the same for every width
    per_unit = 2 * config.width + 1
    width = config.match_ffn_width + round((parameters(reference) - parameters(mixer_config)) / per_unit)
    if width < 1:
        raise ValueError(
            f"model.match={config.match}: {mixer_config.name} alone has more parameters than a block around "
            f"{config.match} with model.match_ffn_width={config.match_ffn_width}; raise that"
        )
    return width


class Block(nn.Module):
    """Pre-norm residual block: ``x + mixer(norm(x))``, then ``x + channel_mixer(norm(x))``."""

    def __init__(self, config: EncoderConfig, mixer_config: MixerConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = nn.LayerNorm(config.width)
        self.mixer = attention.build(mixer_config, config.width, layer=layer, num_layers=config.num_layers)
        self.channel_norm = nn.LayerNorm(config.width)
        native = self.mixer.native_channel_mixer() if config.block == "native" else None
        self.channel_mixer = native or FeedForward(config.width, config.ffn_width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.dropout(self.mixer(self.mixer_norm(x), key_mask))
        return x + self.dropout(self.channel_mixer(self.channel_norm(x), key_mask))


class PixelEmbedding(nn.Module):
    """Intensities 0..255 ``(B, L)`` to vectors ``(B, L, D)``: one number each, normalised, through a linear layer."""

    def __init__(self, mean: float, deviation: float, width: int) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.project = nn.Linear(1, width)

    def forward(self, intensities: torch.Tensor) -> torch.Tensor:
        x = (intensities.to(self.project.weight.dtype) / 255 - self.mean) / self.deviation
        return self.project(x.unsqueeze(-1))


class Encoder(nn.Module):
    """Token ids ``(B, L)`` and their mask to one vector per row ``(B, D)``, or ``(B, M, D)`` for M outputs a row."""

    def __init__(
        self,
        config: EncoderConfig,
        mixer_config: MixerConfig,
        *,
        vocab_size: int,
        length: int,
        outputs: int = 0,
        pixels: tuple[float, float] | None = None,
    ) -> None:
        """``length`` is the longest row in tokens; a prepended CLS vector is counted on top.

        ``outputs`` > 0 gives the vectors of the last so many real positions instead of pooling. ``pixels`` =
        (mean, deviation) takes tokens as intensities 0..255.
        """
        super().__init__()
        if config.pooling == "cls" and mixer_config.causal:
            raise ValueError("model.pooling=cls needs attention.causal=false: a first token sees nothing causally")
        self.pooling = config.pooling
        self.outputs = outputs
        self.activation_checkpointing = False
        """Recompute each block in the backward pass instead of keeping its activations."""
        if pixels:
            self.embedding = PixelEmbedding(*pixels, config.width)
        else:
            self.embedding = nn.Embedding(vocab_size, config.width)
            nn.init.normal_(self.embedding.weight, std=0.02)
        has_cls = config.pooling == "cls" and not outputs
        self.cls = nn.Parameter(torch.randn(config.width) * 0.02) if has_cls else None
        self.length = length + (self.cls is not None)
        table = sinusoids(self.length, config.width)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.randn_like(table) * 0.02)
        elif config.positions == "sinusoidal":
            self.register_buffer("positions", table, persistent=False)
        else:
            self.positions = None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, mixer_config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        """``tokens`` int ``(B, L)``, ``key_mask`` bool ``(B, L)`` with True = real -> ``(B, D)``, ``(B, M, D)``."""
        x = self.embedding(tokens)
        if self.cls is not None:
            x = torch.cat((self.cls.expand(x.shape[0], 1, -1), x), dim=1)
            key_mask = nn.functional.pad(key_mask, (1, 0), value=True)
        if x.shape[1] > self.length:
            raise ValueError(f"a row of {x.shape[1]} tokens exceeds the model's {self.length}; raise task.length")
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, key_mask, use_reentrant=False)
            else:
                x = block(x, key_mask)
        x = self.norm(x)
        return self._last(x, key_mask, self.outputs) if self.outputs else self._pool(x, key_mask)

    @staticmethod
    def _last(x: torch.Tensor, key_mask: torch.Tensor, count: int) -> torch.Tensor:
        """The last ``count`` real positions of each row, ``(B, L, D) -> (B, count, D)``."""
        first = key_mask.sum(dim=1, keepdim=True) - count
        positions = (first + torch.arange(count, device=x.device)).clamp(min=0)
        return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def _pool(self, x: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "cls":
            return x[:, 0]
        if self.pooling == "last":
            positions = torch.arange(x.shape[1], device=x.device)
            last = (positions * key_mask).amax(dim=1)
            return x[torch.arange(x.shape[0], device=x.device), last]
        # masked_fill, not a product: what a mixer leaves at padding must not reach the sum. The divisor is the
        # true length, never the padded one; a row without tokens gives zeros.
        total = x.masked_fill(~key_mask.unsqueeze(-1), 0.0).sum(dim=1)
        return total / key_mask.sum(dim=1, keepdim=True).clamp(min=1)
