"""Heads on top of the encoder.

Shapes: B batch, D model width, K classes.
"""

import torch
from torch import nn


class ClassificationHead(nn.Module):
    """One hidden ReLU layer, then logits: ``(B, D) -> (B, K)``, as in LRA's classifiers."""

    def __init__(self, width: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, hidden)
        self.logits = nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(nn.functional.relu(self.hidden(x)))
