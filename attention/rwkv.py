"""What the RWKV mixers share: the token shift, and channel-mix around it.

Shapes: B batch, L sequence length, D model width.
"""

import torch
from torch import Tensor, nn

from attention.base import check_token, check_tokens


def shift(x: Tensor, steps: int) -> Tensor:
    """``x_{t - steps}`` at t for steps 1 or -1, zero beyond the ends; ``(B, L, D)``."""
    return nn.functional.pad(x, (0, 0, 1, -1) if steps == 1 else (0, 0, -1, 1))


def zero_hidden(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """``x`` with zeros where the mask is False, whatever stood there."""
    return x if key_mask is None else x.masked_fill(~key_mask[..., None], 0)


class ChannelMix(nn.Module):
    """Position-wise ``combine(x_t, neighbour)``, ``(B, L, D) -> (B, L, D)``; each version of RWKV has its ``combine``.

    Causal: every channel sees x_{t-1}. Bidirectional: the first half of the channels sees x_{t-1}, the second half
    x_{t+1}, with the same parameters. Masked positions count as zeros.
    """

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.width, self.causal = width, causal

    def combine(self, x: Tensor, beside: Tensor) -> Tensor:
        """``x`` and the tokens beside it, both ``(..., D)`` -> ``(..., D)``."""
        raise NotImplementedError

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """``x (B, L, D)``, ``key_mask`` bool ``(B, L)`` -> ``(B, L, D)``."""
        check_tokens(x, key_mask, next(self.parameters()))
        x = zero_hidden(x, key_mask)
        if self.causal:
            beside = shift(x, 1)
        else:
            left, right = x.tensor_split(2, -1)
            beside = torch.cat([shift(left, 1), shift(right, -1)], -1)
        return self.combine(x, beside)

    def init_state(self, batch_size: int) -> Tensor:
        """What ``step`` needs before the first token: the last input, ``(B, D)``."""
        return next(self.parameters()).new_zeros(batch_size, self.width)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One token of the causal form: ``x (B, D)`` -> ``(B, D)`` and the next state."""
        if not self.causal:
            raise ValueError("a bidirectional channel-mix cannot stream; set attention.causal=true")
        check_token(x, next(self.parameters()))
        return self.combine(x, state), x
