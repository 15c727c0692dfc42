"""The benchmark of the trainer: both loops do the same work, and the figures are what was measured."""

import pytest

from lra import bench_trainer
from lra.bench_trainer import Outcome, main, report
from lra.config import compose_run
from lra.errors import UserError

SMALL = ["--length", "16", "--batch", "4", "--steps", "2", "--rounds", "3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_trainer, "METER_CALLS", 5)
    # memory of later tests in this process would be hidden
    monkeypatch.setattr(bench_trainer, "tune_allocator", lambda: "default")


def test_it_measures_both_loops(capsys):
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    assert "flash, 4 rows of 8 to 16 tokens, cpu" in text
    assert "trainer / bare" in text


def test_loops_that_do_different_work_are_not_compared(monkeypatch):
    run = bench_trainer.Bare.run
    monkeypatch.setattr(bench_trainer.Bare, "run", lambda self, first, count: 1.1 * run(self, first, count))
    with pytest.raises(RuntimeError, match="same work"):
        main(SMALL)


def test_the_figures_are_of_the_rounds():
    config = compose_run(["task=listops", "attention=flash", "task.length=64", "device=cpu"])
    outcome = Outcome(trainer=[0.0202, 0.0404, 0.0102], bare=[0.02, 0.04, 0.01], meter=50e-6)
    assert outcome.ratios == pytest.approx([1.01, 1.01, 1.02])
    text = report(config, outcome)
    assert "bare loop 20.00 ms/step, trainer 20.20 ms/step" in text
    assert "trainer / bare 1.0100" in text
    assert "meter 50.0 us/step, 0.250 % of a step" in text


def test_no_rounds_are_refused():
    with pytest.raises(UserError, match="--rounds"):
        main([*SMALL, "--rounds", "1"])
