"""Heads on top of the encoder.

Shapes: B batch, D model width, K classes, M outputs a row.
"""

import torch
from torch import nn


class ClassificationHead(nn.Module):
    """One hidden ReLU layer, then logits: ``(..., D) -> (..., K)``, as in LRA's classifiers."""

    def __init__(self, width: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, hidden)
        self.logits = nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(nn.functional.relu(self.hidden(x)))


INTERACTIONS = ("nli", "none")


class MatchingHead(nn.Module):
    """Compares two documents: ``(2 B, D) -> (B, K)``; the vectors a, b of a pair follow one another.

    ``nli``: a hidden ReLU layer on ``[a, b, a * b, a - b]``, the form of the LRA paper (appendix A.1.3).
    ``none``: on ``[a, b]``, what LRA's released code does by default.
    """

    def __init__(self, width: int, hidden: int, num_classes: int, interaction: str = "nli") -> None:
        super().__init__()
        self.interaction = interaction
        self.classify = ClassificationHead((4 if interaction == "nli" else 2) * width, hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.unflatten(0, (-1, 2)).unbind(1)
        parts = (a, b, a * b, a - b) if self.interaction == "nli" else (a, b)
        return self.classify(torch.cat(parts, dim=-1))
