"""Linear attention with ``elu(x) + 1`` features (Katharopoulos et al. 2020, "Transformers are RNNs").

Shapes: B batch, L sequence length, D model width, H heads, E head width (D = H * E).
"""

from dataclasses import dataclass

import torch

from attention.base import MixerConfig
from attention.kernels import linear_attention
from attention.multihead import MultiHead


class Linear(MultiHead):
    """Multi-head linear attention: time and memory linear in L."""

    op = "linear_attention"

    @dataclass
    class Config(MixerConfig):
        """Options of ``linear``."""

        name: str = "linear"
        num_heads: int = 1
        """Heads H; must divide the model width."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        """``(B, H, L, E)`` each -> ``(B, H, L, E)``."""
        return linear_attention(q, k, v, key_mask=key_mask, causal=self.config.causal, kernel=self.config.kernel)
