"""What a task declares, and the contract between tasks and the trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from lra.data.arrays import Split


@dataclass
class TaskConfig:
    """Options that every task has; each task's ``Config`` extends it."""

    name: str = ""
    """Registry name of the task."""
    length: int = 0
    """Longest sequence in tokens. ``regime`` sets it; ``native`` keeps LRA's own."""


@dataclass(frozen=True)
class TaskInfo:
    """A task as it was really loaded: sizes and baselines come from the data, not from a table."""

    name: str
    version: str
    """Changes whenever the same configuration would give other rows; results of two versions are never mixed."""
    vocab_size: int
    """Number of token ids, padding id 0 included."""
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


class Task(Protocol):
    """A task module's class, found through ``lra.tasks.REGISTRY``."""

    Config: ClassVar[type[TaskConfig]]

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
    return float(np.bincount(labels).max() / len(labels))
