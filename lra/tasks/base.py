"""What a task declares, and the contract between tasks and the trainer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from lra.data.arrays import Split

FIDELITIES = ("lra", "s4")


@dataclass
class TaskConfig:
    """Options that every task has; each task's ``Config`` extends it."""

    name: str = ""
    """Registry name of the task."""
    length: int = 0
    """Longest sequence in tokens. ``regime`` sets it; ``native`` keeps LRA's own."""
    fidelity: str = "lra"
    """Whose input pipeline is followed, so whose published numbers compare: ``lra`` or ``s4``."""
    source: str = "auto"
    """``generated``, ``release`` (LRA's own, below ``data_dir``), ``hub``, or a folder; ``auto`` finds out."""
    train_rows: int = 0
    """Rows of the split, a fixed choice of those there are; 0 is all."""
    validation_rows: int = 0
    test_rows: int = 0


@dataclass(frozen=True)
class TaskInfo:
    """A task as it was really loaded: sizes and baselines come from the data, not from a table."""

    name: str
    version: str
    """Changes whenever the same configuration would give other rows; results of two versions are never mixed."""
    vocab_size: int
    """Number of token ids, padding id 0 included where ids are not pixels."""
    num_classes: int
    length: int
    """Upper bound of the sequence length in tokens."""
    splits: dict[str, int]
    """Rows in ``train``, ``validation`` and ``test``."""
    metric: str
    majority_baseline: float
    """Share of the most frequent test label: what a constant answer scores."""
    source: str
    citation: str
    fidelity: str = "lra"
    documents: int = 1
    """Sequences a row; with 2 the network compares them."""
    outputs: int = 0
    """Labels a row, one for each of its last positions; 0 is one label for the whole row."""
    pixels: tuple[float, float] | None = None
    """Tokens are intensities 0..255 that enter as one number each, scaled to [0, 1], less this mean, over this
    deviation. None: ids with an embedding each."""
    lengths: dict = field(default_factory=dict)
    """True lengths of the training sequences: quantiles and a histogram."""
    warnings: tuple[str, ...] = ()
    """What a reader of the number must know, such as rows shorter than the length."""

    def network(self) -> dict:
        """What ``models.build_model`` must know of the task."""
        names = ("vocab_size", "num_classes", "length", "documents", "outputs", "pixels")
        return {name: getattr(self, name) for name in names}


class Task(Protocol):
    """A task module's class, found through ``lra.tasks.REGISTRY``."""

    Config: ClassVar[type[TaskConfig]]

    @staticmethod
    def resolved(config: TaskConfig, data_dir: Path) -> TaskConfig:
        """``config`` with ``auto`` replaced by what it means on this machine."""

    @staticmethod
    def check(config: TaskConfig) -> None:
        """Raise ``UserError`` naming the key if the task cannot give what ``config`` asks for."""

    @staticmethod
    def folder(config: TaskConfig, data_dir: Path) -> Path:
        """Where the prepared arrays of ``config`` live below ``data_dir``."""

    @staticmethod
    def prepare(config: TaskConfig, data_dir: Path, progress: Callable[[int, int], None]) -> Path:
        """Build the arrays unless a valid copy is there; ``progress(done, total)`` in rows. Returns the folder."""

    @staticmethod
    def verify(config: TaskConfig, data_dir: Path) -> list[str]:
        """Recount, rehash and recompute labels; returns one line per proven fact, raises ``UserError`` otherwise."""

    @staticmethod
    def load(config: TaskConfig, data_dir: Path) -> tuple[TaskInfo, dict[str, Split]]:
        """Open the prepared arrays; ``UserError`` if they are missing, truncated, altered or of another version."""


def majority_share(labels: np.ndarray) -> float:
    """Share of the most frequent label."""
    return float(np.bincount(labels.ravel()).max() / labels.size)


def length_statistics(lengths: np.ndarray, limit: int) -> dict:
    """Quantiles of ``lengths``, share of those at the ``limit`` and a histogram of 16 equal bins up to it."""
    quantiles = {"min": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1}
    counts, edges = np.histogram(lengths, bins=16, range=(0, limit))
    return {
        **{name: float(np.quantile(lengths, q)) for name, q in quantiles.items()},
        "mean": float(lengths.mean()),
        "share_at_limit": float((lengths >= limit).mean()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }
