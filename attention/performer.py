"""Performer: softmax attention estimated with random features, FAVOR+ (Choromanski et al. 2021).

Shapes: B batch, L sequence length, D model width, H heads, E head width (D = H * E), M projection rows.
"""

import hashlib
import math
from dataclasses import dataclass

import torch

from attention.base import MixerConfig
from attention.kernels import favor_attention
from attention.kernels.favor import FEATURES, orthogonal_projection
from attention.kernels.favor_torch import favor_step, initial_state
from attention.multihead import StreamingMultiHead, Sums


class Performer(StreamingMultiHead):
    """Multi-head FAVOR+ attention. The heads of a layer share one projection, layers have their own.

    A model trained from scratch with its own kernel, not a drop-in for softmax: at unit-variance q and k and
    the usual M the estimate is further from softmax than the plain mean of v.
    """

    op = "favor_attention"

    @dataclass
    class Config(MixerConfig):
        """Options of ``performer``."""

        name: str = "performer"
        num_heads: int = 1
        """Heads H; must divide the model width."""
        num_features: int = 0
        """Rows M of the projection; 0 means E ln E rounded down, the order that theorem 4 asks for.
        ``hyperbolic`` and ``trig`` make two features of a row."""
        features: str = "positive"
        """``positive`` | ``hyperbolic`` | ``trig``; trig has negative weights, useless at large norms."""
        projection: str = "orthogonal"
        """``orthogonal`` | ``regularised`` (all rows of norm sqrt E: less variance, biased) | ``iid``."""
        projection_seed: int = 0
        """The projection depends on this, the layer and the redraw step: not on data, device or rank."""
        redraw_interval: int = 0
        """Draw a new projection every so many optimiser steps; 0 keeps the first one."""

    def __init__(self, config: Config, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(config, width, layer=layer, num_layers=num_layers)
        if config.features not in FEATURES:
            raise ValueError(f"attention.features={config.features!r} is unknown; choose {' | '.join(FEATURES)}")
        for key, high in (("num_features", 2**16), ("redraw_interval", 10**9)):
            if not 0 <= getattr(config, key) <= high:
                raise ValueError(
                    f"attention.{key}={getattr(config, key)} is out of range; give 1 ... {high}, or 0 for the default"
                )
        self.layer = layer
        # in the state dict: evaluation and a resumed run must use the projection that was trained with
        self.register_buffer("projection", self._draw(step=0, width=width // config.num_heads))

    def _draw(self, step: int, width: int) -> torch.Tensor:
        name = f"{self.config.projection_seed}/{self.layer}/{step}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        num_features = self.config.num_features or max(1, int(width * math.log(width)))
        generator = torch.Generator().manual_seed(seed)
        return orthogonal_projection(num_features, width, kind=self.config.projection, generator=generator)

    def before_step(self, step: int) -> None:
        """Draw the projection of optimiser step ``step`` if one is due."""
        if self.config.redraw_interval and step % self.config.redraw_interval == 0:
            self.projection.copy_(self._draw(step, self.projection.shape[1]))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
        """``(B, H, L, E)`` each -> ``(B, H, L, E)``."""
        return favor_attention(
            q,
            k,
            v,
            self.projection,
            features=self.config.features,
            key_mask=key_mask,
            causal=self.config.causal,
            kernel=self.config.kernel,
        )

    def first_sums(self, batch_size: int) -> Sums:
        """Numerators and denominators ``(B H, F, E + 1)`` and their stabiliser."""
        return initial_state(self.projection, batch_size * self.config.num_heads, features=self.config.features)

    def attend_step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: Sums) -> tuple[torch.Tensor, Sums]:
        """``(B, H, E)`` each -> ``(B, H, E)`` and the next state."""
        return favor_step(q, k, v, self.projection, state, features=self.config.features)
