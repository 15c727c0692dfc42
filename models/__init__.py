"""Networks: an encoder around a token mixer, and a head."""

import torch
from torch import nn

from attention.base import MixerConfig
from models.encoder import Encoder, EncoderConfig
from models.heads import ClassificationHead, MatchingHead

__all__ = ["Classifier", "Encoder", "EncoderConfig", "build_model"]


class Classifier(nn.Module):
    """Token ids ``(B N, L)`` and mask to logits ``(B, K)``, or ``(B, M, K)`` for an encoder with M outputs."""

    def __init__(self, encoder: Encoder, head: ClassificationHead | MatchingHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(tokens, key_mask))


def build_model(
    config: EncoderConfig,
    mixer: MixerConfig,
    *,
    vocab_size: int,
    num_classes: int,
    length: int,
    documents: int = 1,
    outputs: int = 0,
    pixels: tuple[float, float] | None = None,
) -> Classifier:
    """The network for a task of ``vocab_size`` ids, ``num_classes`` classes and rows of up to ``length`` tokens.

    ``documents`` = 2: rows are pairs, both encoded by the same encoder and compared. ``outputs`` = M > 0: one
    prediction for each of the last M positions instead of one for the row. ``pixels`` = (mean, deviation): tokens
    are intensities that enter as numbers instead of ids.
    """
    encoder = Encoder(config, mixer, vocab_size=vocab_size, length=length, outputs=outputs, pixels=pixels)
    # the head is the same for every mixer, also where the blocks' FFN makes up for the mixer's parameters
    hidden = config.match_ffn_width if config.match else config.ffn_width
    if documents == 2:
        return Classifier(encoder, MatchingHead(config.width, hidden, num_classes, config.interaction))
    return Classifier(encoder, ClassificationHead(config.width, hidden, num_classes))
