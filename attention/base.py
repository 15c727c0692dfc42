"""The contract of a token mixer.

Shapes: B batch, L sequence length, D model width, H heads, E head width (D = H * E), M random features.

A mixer maps ``(B, L, D) -> (B, L, D)`` and is the only part of the network that moves information between
positions. ``key_mask`` is bool ``(B, L)``, True = real token. Masked positions never influence the output at a
real position, forward or backward, whatever they hold (NaN included); the output *at* masked positions is finite
and otherwise unspecified.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attention.kernels.inputs import check_tensors


@dataclass
class MixerConfig:
    """Options that every mixer has; each mixer's ``Config`` extends it."""

    name: str = ""
    """Registry name of the mixer."""
    causal: bool = False
    """Position i sees only positions <= i. Classification uses False (bidirectional)."""
    kernel: str = "auto"
    """Kernel behind the op, one of ``attention.kernels.available(op, device)``; ``auto`` takes the best."""


class Mixer(nn.Module):
    """Base class of the token mixers; see the module docstring for the meaning of ``forward``."""

    Config: ClassVar[type[MixerConfig]] = MixerConfig
    op: ClassVar[str]
    """Name of the op in ``attention.kernels``; ``attention.kernels.last_used(op)`` says what really ran."""
    bidirectional: ClassVar[bool] = True
    causal: ClassVar[bool] = True
    streaming: ClassVar[bool] = False
    """Has ``init_state`` and ``step`` with a state whose size does not grow with L."""

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Mix tokens: ``x (B, L, D)``, ``key_mask`` bool ``(B, L)`` -> ``(B, L, D)``."""
        raise NotImplementedError

    def before_step(self, step: int) -> None:
        """Called by the trainer before optimiser step ``step`` (from 1); for what changes between steps."""

    def native_channel_mixer(self) -> nn.Module | None:
        """The mechanism's own position-wise block (RWKV's channel-mix), or None to keep the standard FFN.

        Called as ``module(x, key_mask)`` with the same shapes as ``forward``.
        """
        return None


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``(B, L, D) -> (B, H, L, E)``."""
    batch, length, width = x.shape
    return x.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """``(B, H, L, E) -> (B, L, D)``."""
    batch, heads, length, head_width = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * head_width)


def check_heads(width: int, num_heads: int) -> None:
    """Raise ``ValueError`` unless the heads divide the width."""
    if num_heads < 1 or width % num_heads:
        fits = [h for h in range(1, min(width, 64) + 1) if width % h == 0]
        raise ValueError(f"model.num_heads={num_heads} does not divide model.width={width}; use one of {fits}")


def check_tokens(x: torch.Tensor, key_mask: torch.Tensor | None, weight: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a module of ``weight (D, ...)`` can take ``x (B, L, D)`` and ``key_mask (B, L)``."""
    width = len(weight)
    check_tensors("mixer", weight=weight, x=x, key_mask=key_mask)
    if x.dim() != 3 or x.shape[2] != width or not x.shape[1]:
        raise ValueError(
            f"a mixer takes floating point x (B, L, {width}) with L > 0; got {x.dtype} {tuple(x.shape)}; give it "
            f"embedded tokens, as many numbers a token as model.width={width}"
        )
    _check_dtype(x, weight)
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != x.shape[:2]):
        raise ValueError(
            f"a mixer takes a bool key_mask {tuple(x.shape[:2])} beside this x, True = real token; "
            f"got {key_mask.dtype} {tuple(key_mask.shape)}; 0 and 1 become such a mask with .bool()"
        )


def check_token(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ``ValueError`` unless ``x (B, D)`` is one token a row for a module with ``weight (D, ...)``."""
    check_tensors("mixer", weight=weight, x=x)
    if x.dim() != 2 or x.shape[1] != len(weight):
        raise ValueError(
            f"step takes one token a row, floating point x (B, {len(weight)}); got {x.dtype} {tuple(x.shape)}; "
            "give x[:, t] for token t"
        )
    _check_dtype(x, weight)


def _check_dtype(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"a mixer in {weight.dtype} takes x in {weight.dtype}; got {x.dtype}; give x.to({weight.dtype}), or run it "
            "under torch.autocast (trainer.precision)"
        )
