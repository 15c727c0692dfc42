"""The loader's benchmark compares equal batches."""

import numpy as np
import pytest

from lra.bench_loader import measure
from lra.data.arrays import Split


@pytest.mark.parametrize("documents", [1, 2])
def test_both_pipelines_make_the_same_batches(documents):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 100 * documents)
    tokens = rng.integers(1, 200, lengths.sum()).astype(np.uint8)
    split = Split(tokens, np.concatenate([[0], np.cumsum(lengths)]), np.arange(100) % 2, documents)
    line = measure("toy", 40, split, batch_size=8, batches=10).split()
    assert line[:2] == ["toy", "40"]
    assert float(line[5]) > 0
