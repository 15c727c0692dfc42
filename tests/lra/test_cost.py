"""The estimate scales with what a run does."""

import pytest

from lra.config import compose_run
from lra.cost import Estimate, describe_cost, estimate, probe
from lra.errors import UserError
from lra.memory import GLIBC


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "under a minute"),
        (59.9, "under a minute"),
        (61, "about 1 minute"),
        (90, "about 1.5 minutes"),
        (5399, "about 90.0 minutes"),
        (5400, "about 1.5 hours"),
        (200_000, "about 2.3 days"),
    ],
)
def test_one_is_singular_and_short_is_not_nothing(tiny, monkeypatch, seconds, text):
    monkeypatch.setattr("lra.cost.estimate", lambda config: Estimate(1, 1000, seconds, None))
    config = compose_run([*tiny, "device=cpu", "trainer.batch_size=1", "trainer.steps=7"])
    head, _, line, total = describe_cost([config]).splitlines()
    assert head.startswith("1 run on cpu, ")
    assert " 1 step  x 1 row  " in line
    assert f"parameters  {text:>18}  memory" in line
    assert total == f"  in all {text}"


def test_the_columns_of_the_report_stand_below_each_other(tiny, monkeypatch):
    costs = iter([Estimate(1, 1000, 0.1, None), Estimate(1234, 1000, 5399.0, None)])
    monkeypatch.setattr("lra.cost.estimate", lambda config: next(costs))
    configs = [compose_run([*tiny, "device=cpu", f"trainer.lr={lr}"]) for lr in (0.1, 0.2)]
    head, _, first, second, _ = describe_cost(configs).splitlines()
    assert head.startswith("2 runs on cpu, ")
    assert "1,234 steps x 8 rows" in second
    assert first.index(" x 8 rows") == second.index(" x 8 rows")
    assert first.index("  memory unknown") == second.index("  memory unknown")


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


@pytest.mark.parametrize(
    ("peak", "memory"), [(None, "memory unknown"), (0, "< 8 MiB"), (8 * 2**20 - 1, "< 8 MiB"), (8 * 2**20, "8 MiB")]
)
def test_memory_too_small_to_be_told_is_not_called_none(tiny, monkeypatch, peak, memory):
    monkeypatch.setattr("lra.cost.estimate", lambda config: Estimate(20, 1000, 3600.0, peak))
    text = describe_cost([compose_run([*tiny, "device=cpu", "trainer.batch_size=16", "trainer.accumulation=2"])])
    assert text.splitlines()[2].endswith(f"  {memory}")


def test_a_network_that_does_not_fit_is_one_error(tiny, monkeypatch):
    def fail(config):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes\nmore")

    monkeypatch.setattr("lra.cost.estimate", fail)
    with pytest.raises(UserError, match=r"model.width=16: one row does not fit .*tried 9 bytes\); lower model.width"):
        describe_cost([compose_run(tiny)])


@pytest.mark.skipif(not GLIBC, reason="only glibc gives freed memory back when asked")
def test_a_probe_is_not_hidden_in_the_memory_of_the_one_before(tiny, monkeypatch):
    monkeypatch.setattr("lra.memory._keeps_memory", False)  # whatever ran before in this process
    config = compose_run([*tiny, "device=cpu", "attention=linear"])
    first, second = (probe(config, rows=64, length=63)[1] for _ in range(2))
    # what a block keeps of 64 rows of 63 tokens of width 16 for its backward pass is 256 KB a tensor
    assert min(first, second) > 4 * 64 * 63 * 16 * 4
