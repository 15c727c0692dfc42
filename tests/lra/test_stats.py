"""Proportions: values of the Wilson interval from the literature, and the stuck test."""

import pytest

from lra.stats import is_stuck, wilson


def test_wilson_matches_published_examples():
    # Newcombe 1998, table I, method 3: 81/263, 15/148, 0/20, 1/29
    expected = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (correct, total), interval in expected.items():
        assert wilson(correct, total) == pytest.approx(interval, abs=6e-5)


@pytest.mark.parametrize(("correct", "total"), [(-1, 5), (6, 5), (0, 0)])
def test_wilson_refuses_what_is_no_proportion(correct, total):
    with pytest.raises(ValueError, match="no proportion"):
        wilson(correct, total)


def test_stuck_means_the_interval_reaches_the_majority_baseline():
    assert is_stuck(340, 2000, 0.17)  # exactly the constant answer
    assert is_stuck(370, 2000, 0.17)  # 18.5 %, interval from 16.9 %
    assert not is_stuck(400, 2000, 0.17)  # 20 %, interval from 18.3 %
