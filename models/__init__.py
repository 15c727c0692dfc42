"""Networks: an encoder around a token mixer, and a head."""

import torch
from torch import nn

from attention.base import MixerConfig
from models.encoder import Encoder, EncoderConfig
from models.heads import ClassificationHead

__all__ = ["Classifier", "Encoder", "EncoderConfig", "build_model"]


class Classifier(nn.Module):
    """Token ids ``(B, L)`` and mask to class logits ``(B, K)``."""

    def __init__(self, encoder: Encoder, head: ClassificationHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(tokens, key_mask))


def build_model(
    config: EncoderConfig, mixer: MixerConfig, *, vocab_size: int, num_classes: int, length: int
) -> Classifier:
    """The network for a task of ``vocab_size`` ids, ``num_classes`` classes and rows of up to ``length`` tokens."""
    encoder = Encoder(config, mixer, vocab_size=vocab_size, length=length)
    return Classifier(encoder, ClassificationHead(config.width, config.ffn_width, num_classes))
