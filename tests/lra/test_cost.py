"""The estimate scales with what a run does."""

import pytest

from lra.config import compose_run
from lra.cost import Estimate, describe_cost, estimate


def test_an_estimate_counts_steps_batch_and_validation(tiny, monkeypatch):
    monkeypatch.setattr("lra.cost.probe", lambda config, rows, length: (0.6 * rows, 100, 7))
    config = compose_run([*tiny, "device=cpu"])  # 20 steps x 8 rows, 2 validations of 64 rows
    got = estimate(config)
    assert got == Estimate(steps=20, parameters=7, seconds=pytest.approx(0.6 * (160 + 128 / 3)), peak_bytes=800)


def test_the_report_sums_over_runs(tiny, monkeypatch):
    monkeypatch.setattr("lra.cost.estimate", lambda config: Estimate(20, 1000, 3600.0, None))
    text = describe_cost([compose_run([*tiny, f"seed={s}"]) for s in range(3)])
    assert "in all about 3.0 hours" in text
    assert text.count("memory unknown") == 3


def test_a_real_probe_gives_a_time_and_the_parameters(tiny):
    got = estimate(compose_run([*tiny, "device=cpu"]))
    assert got.seconds > 0
    assert 1000 < got.parameters < 10_000


@pytest.mark.parametrize(
    ("budget", "steps"),
    [("epochs=2", 64), ("tokens=8000", None), ("seconds=12", 3), ("time_limit=9.6", 2)],
)
def test_other_budgets_come_to_steps(tiny, monkeypatch, budget, steps):
    # a row takes 0.6 s, so a step of 8 rows 4.8 s; an epoch of 256 rows is 32 steps
    monkeypatch.setattr("lra.cost.probe", lambda config, rows, length: (0.6 * rows, 100, 7))
    config = compose_run([*tiny, "device=cpu", f"trainer.{budget}"])
    got = estimate(config).steps
    if steps is None:  # rows have 17 to 63 tokens
        assert 8000 / (8 * 63) <= got <= 1 + 8000 / (8 * 17)
    else:
        assert got == steps
