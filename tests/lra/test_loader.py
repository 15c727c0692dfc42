"""Batches: nothing lost, nothing twice, padding known from lengths."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from lra.data.loader import eval_indices, make_batch, train_indices


class RaggedRows:
    """Rows of random length; row i holds the value i + 1 everywhere, so that a row can be recognised."""

    def __init__(self, count: int, longest: int = 40) -> None:
        self.lengths = np.random.default_rng(0).integers(1, longest + 1, count)
        self.labels = np.arange(count) % 3

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.lengths[indices]
        tokens = np.zeros((len(indices), lengths.max()), np.int64)
        for out, index, length in zip(tokens, indices, lengths):
            out[:length] = index + 1
        return tokens, lengths


@pytest.mark.parametrize(("count", "batch"), [(100, 8), (7, 7), (5, 8), (1000, 4), (33, 32)])
def test_training_draws_every_row_equally_often(count, batch):
    split = RaggedRows(count)
    batches = list(islice(train_indices(split, batch, seed=1), 3 * count // batch + 1))
    assert all(len(b) == batch for b in batches)
    seen = Counter(np.concatenate(batches).tolist())
    epochs = len(batches) * batch / count
    window_epochs = 1 + 50 * batch / count  # rows still waiting in the current window
    assert min(seen.get(i, 0) for i in range(count)) >= epochs - 1 - window_epochs
    assert max(seen.values()) <= epochs + 1 + window_epochs


def test_the_order_depends_on_the_seed_only():
    split = RaggedRows(200)

    def order(seed: int) -> list[int]:
        return np.concatenate(list(islice(train_indices(split, 8, seed), 50))).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_batches_hold_rows_of_similar_length_in_random_order():
    split = RaggedRows(5000, longest=500)
    batches = list(islice(train_indices(split, 16, seed=0), 100))
    spread = np.mean([np.ptp(split.lengths[b]) for b in batches])
    assert spread < 40  # 450 for unsorted batches
    means = [split.lengths[b].mean() for b in batches]
    assert abs(np.corrcoef(means, range(100))[0, 1]) < 0.3


@pytest.mark.parametrize(("count", "batch"), [(1, 8), (8, 8), (9, 8), (100, 7)])
def test_evaluation_reads_every_row_once(count, batch):
    split = RaggedRows(count)
    batches = list(eval_indices(split, batch))
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    assert split.lengths[batches[0][0]] == split.lengths.max()


def test_the_mask_comes_from_lengths():
    split = RaggedRows(20)
    indices = np.array([3, 11, 5])
    batch = make_batch(split, indices, torch.device("cpu"))
    assert batch.tokens.shape == (3, split.lengths[indices].max())
    assert batch.key_mask.sum(1).tolist() == split.lengths[indices].tolist()
    assert batch.real_tokens == split.lengths[indices].sum()
    assert torch.equal(batch.key_mask, batch.tokens != 0)  # row values are never 0 in this split
    assert batch.labels.tolist() == split.labels[indices].tolist()
