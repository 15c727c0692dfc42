"""True lengths in the result, and the warning where most rows are shorter than the length."""

import numpy as np
import pytest

from lra.tasks.base import length_statistics
from lra.tasks.retrieval import Config, Retrieval


def test_statistics_by_hand():
    found = length_statistics(np.array([1, 3, 16, 16]), 16)
    assert (found["min"], found["median"], found["max"], found["mean"]) == (1, 9.5, 16, 9)
    # a row that was cut has the length of the limit itself
    assert found["share_at_limit"] == 0.5
    counts = found["histogram"]["counts"]
    assert {i: count for i, count in enumerate(counts) if count} == {1: 1, 3: 1, 15: 2}
    assert found["histogram"]["edges"] == list(range(17))


@pytest.mark.parametrize(("short", "warned"), [(5, False), (6, True)])
def test_most_rows_is_more_than_half(short, warned):
    lengths = np.array([99] * short + [100] * (10 - short))
    found = Retrieval.warnings(Config(length=100), lengths, {})
    assert bool(found) == warned
    assert not found or found[0].startswith("60 % of the training sequences are shorter than 100 tokens (median 99)")
