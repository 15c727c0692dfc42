"""Batches from memory-mapped rows.

Shapes: B batch, L longest sequence of the batch, N documents a row (1, or 2 where two are compared), M outputs a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lra.data.arrays import Split

BUCKET_BATCHES = 50
"""Batches that are drawn, sorted by length and cut together: padding is small and order stays random."""


@dataclass(frozen=True)
class Batch:
    """Token ids ``(B N, L)``, mask ``(B N, L)`` with True = real, labels ``(B,)`` or ``(B, M)``."""

    tokens: torch.Tensor
    key_mask: torch.Tensor
    labels: torch.Tensor
    real_tokens: int

    @property
    def padded_tokens(self) -> int:
        """Positions that the network processes, padding included."""
        return self.tokens.numel()


def make_batch(split: Split, indices: np.ndarray, device: torch.device) -> Batch:
    """The rows at ``indices``, padded to the longest of them."""
    tokens, lengths = split.rows(indices)
    mask = np.arange(tokens.shape[1])[None, :] < lengths[:, None]
    labels = split.labels[indices].astype(np.int64)
    parts = [torch.from_numpy(x).to(device, non_blocking=True) for x in (tokens, mask, labels)]
    return Batch(*parts, real_tokens=int(lengths.sum()))


def padded_tokens(split: Split, parts: list[np.ndarray]) -> tuple[int, int]:
    """Real tokens, and positions with padding, of batches with the rows ``parts``."""
    sequences = split.sequence_lengths.reshape(-1, split.documents)
    real = sum(int(sequences[part].sum()) for part in parts)
    return real, sum(len(part) * split.documents * int(split.lengths[part].max()) for part in parts)


def train_indices(split: Split, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Row indices of one batch after the other, for ever.

    Every epoch is a fresh permutation; a remainder that fills no batch opens the next epoch, so no row is lost.
    Within windows of ``BUCKET_BATCHES`` batches rows are sorted by length before they are cut into batches, and
    the batches of a window come in random order.
    """
    rng = np.random.default_rng(seed)
    window = BUCKET_BATCHES * batch_size
    rest = np.empty(0, np.int64)
    while True:
        rest = np.concatenate((rest, rng.permutation(len(split))))
        while len(rest) >= window or len(rest) >= batch_size and len(split) < window:
            cut = min(window, len(rest) // batch_size * batch_size)
            drawn, rest = rest[:cut], rest[cut:]
            drawn = drawn[np.argsort(split.lengths[drawn], kind="stable")]
            batches = drawn.reshape(-1, batch_size)
            yield from batches[rng.permutation(len(batches))]


def eval_indices(split: Split, batch_size: int) -> Iterator[np.ndarray]:
    """Every row exactly once, longest first so that a memory shortage shows at once."""
    order = np.argsort(-split.lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
