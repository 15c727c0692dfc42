"""Scores against values computed by hand."""

import math

import numpy as np
import pytest

from lra.evaluation import Predictions, expected_calibration_error


def test_a_score_by_hand():
    predictions = Predictions(
        labels=np.array([0, 0, 1, 3]),
        predicted=np.array([0, 1, 1, 1]),
        confidence=np.array([0.9, 0.8, 0.7, 0.6]),
        log_probability=np.log([0.9, 0.1, 0.7, 0.2]),
    )
    score = predictions.score(4)
    assert (score.correct, score.labels, score.accuracy) == (2, 4, 0.5)
    assert score.loss == pytest.approx(-sum(map(math.log, (0.9, 0.1, 0.7, 0.2))) / 4)
    assert score.per_class == [0.5, 1.0, None, 0.0]  # class 2 never occurs


def test_several_outputs_a_row_are_several_labels():
    labels = np.array([[0, 1], [1, 1]])
    ones = np.ones((2, 2))
    score = Predictions(labels, np.array([[0, 1], [0, 1]]), ones, np.log(ones)).score(2)
    assert (score.correct, score.labels) == (3, 4)
    assert score.per_class == [1.0, 2 / 3]


def test_calibration_error_by_hand():
    # bins of width 1/15: 0.9 and 0.91 share [13/15, 14/15), 0.5 is alone in [7/15, 8/15)
    confidence, hits = np.array([0.9, 0.91, 0.5]), np.array([True, False, True])
    expected = (abs(0.9 + 0.91 - 1) + abs(0.5 - 1)) / 3
    assert expected_calibration_error(confidence, hits) == pytest.approx(expected)
    # sure and right everywhere: no error, and confidence 1 has a bin
    assert expected_calibration_error(np.ones(5), np.ones(5, bool)) == 0


def test_calibration_of_honest_guesses_goes_to_zero():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(size=200_000)
    assert expected_calibration_error(confidence, rng.uniform(size=200_000) < confidence) < 0.01
