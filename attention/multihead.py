"""What the mixers with heads share: projections, heads, padding. They differ in ``attend`` alone, and those that can
stream in ``first_sums`` and ``attend_step``.

Shapes: B batch, L sequence length, D model width, H heads, E head width (D = H * E).
"""

import torch
from torch import nn

from attention.base import Mixer, MixerConfig, check_heads, check_token, check_tokens, merge_heads, split_heads


class MultiHead(Mixer):
    """``W_o attend(W_q x, W_k x, W_v x)`` without biases, so all such mixers have 4 D^2 parameters."""

    def __init__(self, config: MixerConfig, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__()
        check_heads(width, config.num_heads)
        self.config = config
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        # one D x D matrix each: Xavier as for three separate ones, not for their (3D, D) stack
        for weight in (*self.qkv.weight.chunk(3), self.out.weight):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Mix tokens: ``x (B, L, D)``, ``key_mask`` bool ``(B, L)`` -> ``(B, L, D)``."""
        check_tokens(x, key_mask, self.out.weight)
        if key_mask is not None:
            # padding may hold NaN and must go here: the weight gradient of W_q sums over all positions
            x = x.masked_fill(~key_mask[..., None], 0.0)
        q, k, v = (split_heads(part, self.config.num_heads) for part in self.qkv(x).chunk(3, -1))
        return self.out(merge_heads(self.attend(q, k, v, key_mask)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        """``(B, H, L, E)`` each -> ``(B, H, L, E)``."""
        raise NotImplementedError


Sums = tuple[torch.Tensor, ...]
"""What a stream has seen, in at least fp32; its size does not grow with L."""


class StreamingMultiHead(MultiHead):
    """Heads whose causal form is also a recurrence: ``step`` gives the outputs of ``forward`` one by one."""

    streaming = True

    def init_state(self, batch_size: int) -> Sums:
        """What ``step`` needs before the first token."""
        self._check_causal()
        return self.first_sums(batch_size)

    def step(self, x: torch.Tensor, state: Sums) -> tuple[torch.Tensor, Sums]:
        """One token of the causal form: ``x (B, D)`` -> ``(B, D)`` and the next state."""
        self._check_causal()
        check_token(x, self.out.weight)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.config.num_heads, -1)).unbind(1)
        with torch.autocast(x.device.type, enabled=False):
            y, state = self.attend_step(q, k, v, state)
        return self.out(y.flatten(1)), state

    def first_sums(self, batch_size: int) -> Sums:
        """The state before the first token."""
        raise NotImplementedError

    def attend_step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: Sums) -> tuple[torch.Tensor, Sums]:
        """``(B, H, E)`` each -> ``(B, H, E)`` and the next state."""
        raise NotImplementedError

    def _check_causal(self) -> None:
        if not self.config.causal:
            raise ValueError(f"a bidirectional attention={self.config.name} cannot stream; set attention.causal=true")
