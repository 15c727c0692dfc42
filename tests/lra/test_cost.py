"""The estimate scales with what a run does."""

import pytest

from lra.config import compose_run
from lra.cost import Estimate, describe_cost, estimate


def test_an_estimate_counts_steps_batch_and_validation(tiny, monkeypatch):
    monkeypatch.setattr("lra.cost.probe", lambda config, rows, length: (0.6 * rows, 100, 7))
    config = compose_run([*tiny, "device=cpu"])  # 20 steps x 8 rows, 2 validations of 64 rows
    got = estimate(config)
    assert got == Estimate(parameters=7, seconds=pytest.approx(0.6 * (160 + 128 / 3)), peak_bytes=800)


def test_the_report_sums_over_runs(tiny, monkeypatch):
    monkeypatch.setattr("lra.cost.estimate", lambda config: Estimate(1000, 3600.0, None))
    text = describe_cost([compose_run([*tiny, f"seed={s}"]) for s in range(3)])
    assert "in all about 3.0 hours" in text
    assert text.count("memory unknown") == 3


def test_a_real_probe_gives_a_time_and_the_parameters(tiny):
    got = estimate(compose_run([*tiny, "device=cpu"]))
    assert got.seconds > 0
    assert 1000 < got.parameters < 10_000
