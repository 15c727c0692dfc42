"""Budgets: what ends a training, and how the learning rate follows."""

import pytest

from lra import sweep
from lra.budget import Budget, Spent
from lra.config import compose_run
from lra.errors import UserError
from lra.outcome import outcome
from lra.protocol import TrainerConfig
from lra.train import run


def test_epochs_become_steps_rounded_up():
    budget = Budget(TrainerConfig(epochs=1.5, batch_size=8, warmup=2), train_rows=100)
    assert budget.steps == 19  # 150 rows / 8
    assert not budget.done(Spent(steps=18))
    assert budget.done(Spent(steps=19))


def test_tokens_and_seconds_replace_the_steps():
    tokens = Budget(TrainerConfig(tokens=1000), 100)
    assert tokens.steps is None
    assert not tokens.done(Spent(steps=10**6, tokens=999))
    assert tokens.done(Spent(tokens=1000))
    assert tokens.decay(5, Spent(tokens=250)) == 0.25
    seconds = Budget(TrainerConfig(seconds=10), 100)
    assert seconds.done(Spent(seconds=10.5))
    assert seconds.decay(5, Spent(seconds=11)) == 1


def test_the_time_limit_cuts_any_budget_short():
    budget = Budget(TrainerConfig(steps=100, time_limit=5), 100)
    assert budget.done(Spent(steps=3, seconds=5.1))
    assert budget.cut_short(Spent(steps=3, seconds=5.1))
    assert not budget.cut_short(Spent(steps=100, seconds=5.1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 1.0, "tokens": 5}, "trainer.epochs and trainer.tokens are both budgets"),
        ({"seconds": -1.0}, "trainer.seconds=-1.0 is negative"),
        ({"time_limit": float("nan")}, "trainer.time_limit=nan is not finite"),
        ({"on_oom": "retry"}, "trainer.on_oom='retry' is unknown; choose fail | halve"),
        ({"seconds": 1e300}, r"trainer.seconds=1e\+300 is out of range; give 0 ... 1000000000"),
        ({"tokens": 10**15 + 1}, "trainer.tokens=1000000000000001 is out of range; give 0 ... 1000000000000000"),
        ({"memory_limit_gib": 1e300}, "trainer.memory_limit_gib=.* is out of range"),
        ({"lr": 1e300}, r"trainer.lr=1e\+300 must be positive, and at most 3e\+38"),
        ({"lr_tried": [1e-3, float("nan")]}, "trainer.lr_tried=nan must be positive"),
        ({"eps": 1e-300}, "trainer.eps=1e-300 is 0 in fp32"),
        ({"precision": "fp16"}, "trainer.precision=fp16: .*use bf16"),
    ],
)
def test_bad_values_name_their_key(values, message):
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**values).validate()


def test_warm_up_longer_than_the_epochs_is_refused():
    with pytest.raises(UserError, match=r"trainer.epochs=1 of 16 rows make 2 steps, not more than trainer.warmup=60"):
        Budget(TrainerConfig(epochs=1, batch_size=8), 16)


def test_a_batch_of_more_rows_than_there_are_is_refused_before_anything_is_written(tiny):
    """The loader would fill it with rows that it has already."""
    message = r"^trainer.batch_size=257 is more than the rows to train on, 256: .*give trainer.batch_size=256 or less"
    config = compose_run([*tiny, "trainer.batch_size=257"])
    with pytest.raises(UserError, match=message):
        run(config)
    assert not config.run_dir.exists()
    for budget in ("trainer.steps=20", "trainer.tokens=1000", "trainer.seconds=1"):
        with pytest.raises(UserError, match=message):
            sweep.main([*tiny, "trainer.batch_size=256,257", budget])
        with pytest.raises(UserError, match=message):
            sweep.main([*tiny, "device=cpu", "trainer.batch_size=257", budget, "--dry-run"])
    assert not list(config.run_dir.parent.glob("*"))
    assert Budget(compose_run([*tiny, "trainer.batch_size=256", "trainer.epochs=3"]).trainer, 256).steps == 3


def test_epochs_that_do_not_fit_the_rows_are_refused_before_anything_is_written(tiny):
    config = compose_run([*tiny, "trainer.epochs=1e-9"])
    with pytest.raises(UserError, match="make 1 step, not more than trainer.warmup"):
        run(config)
    assert not config.run_dir.exists()


def test_a_budget_that_ends_before_a_step_is_timed_still_has_an_outcome(tiny):
    row = run(compose_run([*tiny, "trainer.time_limit=1e-9"]))
    assert (row.steps, row.step_ms) == (1, None)
    assert outcome(row).split(": ")[1].endswith("no step timed")
    assert any(text.startswith("no step was timed") for text in row.warnings)


def test_equal_tokens_by_one_override(tiny):
    row = run(compose_run([*tiny, "trainer.tokens=20000"]))
    # about 8 rows of 40 tokens a step: the budget is met by the last step and not by the one before
    assert row.steps * 8 * 64 >= 20_000
    assert row.steps > 20_000 / (8 * 64)
    assert row.steps != 20


def test_equal_time_by_one_override(tiny):
    row = run(compose_run([*tiny, "trainer.seconds=1"]))
    assert row.train_seconds >= 1
    assert row.train_seconds - 1 < 1


def test_a_time_limit_is_in_the_result(tiny):
    row = run(compose_run([*tiny, "trainer.steps=100000", "trainer.time_limit=0.5"]))
    assert row.steps < 100_000
    assert any(f"ended the training at step {row.steps} of 100000" in text for text in row.warnings)
