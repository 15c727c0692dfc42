"""Linear attention with ``elu(x) + 1`` features (Katharopoulos et al. 2020, "Transformers are RNNs").

Shapes: B batch, L sequence length, D model width, H heads, E head width (D = H * E).
"""

from dataclasses import dataclass

import torch

from attention.base import MixerConfig
from attention.kernels import linear_attention
from attention.kernels.linear import initial_state, linear_step
from attention.multihead import StreamingMultiHead, Sums


class Linear(StreamingMultiHead):
    """Multi-head linear attention: time and memory linear in L; the state of a stream is E (E + 1) numbers a head."""

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

    def first_sums(self, batch_size: int) -> Sums:
        """``(B, H, E, E + 1)`` zeros."""
        width = self.out.weight.shape[0] // self.config.num_heads
        return (initial_state(self.out.weight, batch_size, self.config.num_heads, width),)

    def attend_step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: Sums) -> tuple[torch.Tensor, Sums]:
        """``(B, H, E)`` each -> ``(B, H, E)`` and the next state."""
        y, sums = linear_step(q, k, v, *state)
        return y, (sums,)
