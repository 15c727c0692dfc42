"""Exact softmax attention, materialised (``softmax``) or by FlashAttention (``flash``): one function.

Shapes: B batch, L sequence length, D model width, H heads, E head width (D = H * E).
"""

from dataclasses import dataclass

import torch

from attention.base import MixerConfig
from attention.kernels import softmax_attention
from attention.multihead import MultiHead


class Softmax(MultiHead):
    """Multi-head attention (Vaswani et al. 2017, section 3.2) with the L x L weights in memory."""

    op = "softmax_attention"

    @dataclass
    class Config(MixerConfig):
        """Options of ``softmax``."""

        name: str = "softmax"
        kernel: str = "reference"
        num_heads: int = 1
        """Heads H; must divide the model width."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        """``(B, H, L, E)`` each -> ``(B, H, L, E)``."""
        return softmax_attention(
            q,
            k,
            v,
            key_mask=key_mask,
            causal=self.config.causal,
            skip_masked_queries=True,  # nobody reads a mixer's output at padding
            kernel=self.config.kernel,
        )


class Flash(Softmax):
    """The same attention in O(L) memory (Dao et al. 2022)."""

    @dataclass
    class Config(Softmax.Config):
        """Options of ``flash``."""

        name: str = "flash"
        kernel: str = "auto"
