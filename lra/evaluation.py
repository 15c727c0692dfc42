"""One pass over a split: every row scored exactly once.

Shapes: B batch, M outputs a row (absent where a row has one label), K classes, R rows.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lra.data.arrays import Split
from lra.data.loader import eval_indices, make_batch
from lra.distributed import Ranks
from lra.results import write_atomic

BINS = 15


@dataclass(frozen=True)
class Score:
    """Outcome of one pass over a split."""

    correct: int
    labels: int
    """Labels scored: one a row, or one for each output of a row."""
    loss: float
    """Mean cross-entropy in nats."""
    per_class: list[float | None] = field(default_factory=list)
    """Accuracy on the labels of each class; ``None`` for a class that does not occur."""
    calibration_error: float | None = None

    @property
    def accuracy(self) -> float:
        return self.correct / self.labels


@dataclass
class Predictions:
    """What the network said of every label, in the order of the rows: (R,) or (R, M) each."""

    labels: np.ndarray
    predicted: np.ndarray
    """The most probable class."""
    confidence: np.ndarray
    """Its probability."""
    log_probability: np.ndarray
    """Of the true label, in nats."""

    def score(self, num_classes: int) -> Score:
        """Accuracy, loss, accuracy by class and calibration."""
        hits = self.predicted == self.labels
        counts = np.bincount(self.labels.ravel(), minlength=num_classes)
        right = np.bincount(self.labels[hits].ravel(), minlength=num_classes)
        return Score(
            correct=int(hits.sum()),
            labels=hits.size,
            loss=float(-self.log_probability.mean(dtype=np.float64)),
            per_class=[float(r / c) if c else None for r, c in zip(right, counts)],
            calibration_error=expected_calibration_error(self.confidence.ravel(), hits.ravel()),
        )


def expected_calibration_error(confidence: np.ndarray, hits: np.ndarray) -> float:
    """Mean gap between confidence and accuracy over 15 equal bins of confidence, weighted by their labels.

    Guo et al. 2017 (arXiv 1706.04599), equation 3.
    """
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gap = np.bincount(bins, confidence, BINS) - np.bincount(bins, hits, BINS)
    return float(np.abs(gap).sum() / len(hits))


def predict(
    model: nn.Module,
    split: Split,
    *,
    rows_at_once: int,
    device: torch.device,
    autocast: Callable[[], object],
    ranks: Ranks,
    between: Callable[[], None] = lambda: None,
) -> Predictions:
    """Run ``model`` in evaluation mode over every row of ``split``, the batches dealt out to the ranks.

    ``between`` is called before each batch; it may raise to stop.
    """
    shape = split.labels.shape
    # rows of other ranks stay zero, so that the sum over the ranks puts the parts together
    found = torch.zeros((3, *shape), dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), autocast():
            for number, indices in enumerate(eval_indices(split, rows_at_once)):
                between()
                if number % ranks.world == ranks.rank:
                    batch = make_batch(split, indices, device)
                    log_p = model(batch.tokens, batch.key_mask).float().log_softmax(dim=-1)
                    best, predicted = log_p.max(dim=-1)
                    of_label = log_p.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
                    found[:, torch.from_numpy(indices)] = torch.stack((predicted, best.exp(), of_label)).double().cpu()
    finally:
        model.train(was_training)
    if ranks.world > 1:
        found = ranks.sum(found.to(device)).cpu()
    predicted, confidence, log_probability = found.numpy()
    return Predictions(split.labels, predicted.astype(np.int64), confidence, log_probability)


def save_predictions(predictions: Predictions, path: Path) -> None:
    """Write ``predictions`` as a NumPy archive, for paired comparisons of two runs row by row."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        labels=predictions.labels.astype(np.int32),
        predicted=predictions.predicted.astype(np.int32),
        confidence=predictions.confidence.astype(np.float32),
        log_probability=predictions.log_probability.astype(np.float32),
    )
    write_atomic(path, buffer.getvalue())
