"""Killed, interrupted, damaged: a run goes on bit for bit, or says why it cannot."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lra import results
from lra.checkpoint import Checkpoints
from lra.config import compose_run
from lra.errors import UserError
from lra.evaluation import Predictions
from lra.resume import main as resume
from lra.train import run
from lra.trainer import Trainer
from models import Classifier

ROOT = Path(__file__).resolve().parents[2]
LONG = ["trainer.steps=60", "trainer.eval_every=4", "trainer.log_every=1"]


def metrics(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def best_weights(run_dir: Path) -> dict:
    return torch.load(max((run_dir / "checkpoints").glob("best-*.pt")), weights_only=True)


def same_outcome(one: Path, other: Path) -> None:
    """Everything but the clock is equal, to the last bit."""
    assert metrics(one) == metrics(other)
    first, second = best_weights(one), best_weights(other)
    assert first["step"] == second["step"]
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    rows = [results.load(folder / "result.json") for folder in (one, other)]
    for key in ("status", "test_accuracy", "validation_accuracy", "selected_step", "steps", "epochs", "test_loss"):
        assert getattr(rows[0], key) == getattr(rows[1], key), key
    for key, expected in np.load(one / "predictions.npz").items():
        assert np.array_equal(expected, np.load(other / "predictions.npz")[key])


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that arrives in the middle of a step."""
    original = Trainer._step

    def stepping(self: Trainer, number: int, *rest: object) -> tuple[float, float]:
        if number == step:
            self.stop.requested = True
        return original(self, number, *rest)

    monkeypatch.setattr(Trainer, "_step", stepping)


def train_and_kill(kills: int, overrides: list[str]) -> tuple[int, int]:
    """Run to the end with so many kills on the way; how many there were, and how many of them in a write."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.lra.kill_loop", "0", str(kills), *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    killed, while_writing = map(int, done.stdout.split())
    return killed, while_writing


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run that nothing interrupted, done once for all tests of the same overrides."""
    done: dict[tuple[str, ...], Path] = {}

    def run_dir(overrides: list[str]) -> Path:
        same = tuple(o for o in overrides if not o.startswith("runs_dir="))
        if same not in done:
            config = compose_run([*same, f"runs_dir={tmp_path_factory.mktemp('whole')}"])
            run(config)
            done[same] = config.run_dir
        return done[same]

    return run_dir


@pytest.mark.slow
def test_twenty_kills_change_nothing(tiny, tmp_path):
    overrides = [*tiny, "attention=performer", "attention.redraw_interval=7", "trainer.steps=400", *LONG[1:]]
    whole = [*overrides, f"runs_dir={tmp_path / 'whole'}"]
    assert train_and_kill(0, whole) == (0, 0)
    killed, while_writing = train_and_kill(20, overrides)
    assert killed == 20
    assert while_writing >= 1
    run_dir = compose_run(overrides).run_dir
    steps = [row["trainer/step"] for row in metrics(run_dir)]
    assert steps == list(range(1, 401))
    same_outcome(compose_run(whole).run_dir, run_dir)
    assert len(list((run_dir / "checkpoints").glob("step-*.pt"))) == 2


@pytest.mark.parametrize("name", ["flash", "performer", "rwkv7", "mamba"])
@pytest.mark.parametrize("step", [7, 12])
def test_an_interrupted_run_goes_on_bit_for_bit(tiny, whole, monkeypatch, name, step):
    overrides = [*tiny, f"attention={name}", "trainer.log_every=1", "trainer.eval_every=4"]
    expected = whole(overrides)
    config = compose_run(overrides)
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        row = run(config)
    assert (row.status, row.resumable, row.steps) == ("interrupted", True, step)
    row = run(config)
    assert row.warnings == [f"resumed at step {step}"]
    assert not list(Path(config.runs_dir).glob(".replaced/*"))
    same_outcome(expected, config.run_dir)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_forward_pass_does_not_wait_for_the_step(tiny, whole, monkeypatch, sent):
    overrides = [*tiny, "attention=linear", "trainer.log_every=1", "trainer.eval_every=4"]
    expected = whole(overrides)
    config = compose_run(overrides)
    original, calls = Classifier.forward, []

    def forward(self: Classifier, *inputs: torch.Tensor) -> torch.Tensor:
        out = original(self, *inputs)  # dropout has drawn its random numbers
        calls.append(self.training)
        if sum(calls) == 7:
            os.kill(os.getpid(), sent)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "forward", forward)
        row = run(config)
    assert (row.status, row.resumable, row.steps) == ("interrupted", True, 6)
    assert run(config).warnings == ["resumed at step 6"]
    same_outcome(expected, config.run_dir)


def test_an_update_cut_in_two_by_a_second_signal_is_not_kept(tiny, whole, monkeypatch):
    overrides = [*tiny, "trainer.log_every=1", "trainer.eval_every=4"]
    expected = whole(overrides)
    config = compose_run(overrides)
    original, calls = torch.optim.AdamW.step, []

    def cut(self: torch.optim.AdamW, *rest: object) -> None:
        calls.append(1)
        original(self, *rest)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGTERM)  # waits for the update
            os.kill(os.getpid(), signal.SIGTERM)  # does not

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", cut)
        assert run(config).status == "interrupted"
    row = run(config)
    assert row.warnings == ["resumed at step 4"]
    same_outcome(expected, config.run_dir)


def test_an_interrupted_validation_is_done_again(tiny, whole, monkeypatch):
    overrides = [*tiny, "trainer.log_every=1", "trainer.eval_every=4"]
    expected = whole(overrides)
    config = compose_run(overrides)
    original = Trainer.predict

    def stopped(self: Trainer, split: str) -> Predictions:
        if self.step == 8:
            self.stop.requested = True
        return original(self, split)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "predict", stopped)
        assert run(config).status == "interrupted"
    assert [row["trainer/step"] for row in metrics(config.run_dir)] == list(range(1, 8))
    run(config)
    same_outcome(expected, config.run_dir)


def test_time_and_memory_of_all_parts_are_kept(tiny, monkeypatch):
    config = compose_run([*tiny, "trainer.eval_every=4"])
    with monkeypatch.context() as patch:
        interrupt_at(12, patch)
        first = run(config)
    second = run(config)
    assert second.steps == 20
    assert second.seconds.compute > first.seconds.compute
    assert second.seconds.evaluation > first.seconds.evaluation


@pytest.fixture
def interrupted(tiny, monkeypatch):
    """A run that was stopped at step 12, with checkpoints of steps 8 and 12."""
    config = compose_run([*tiny, "trainer.eval_every=4"])
    with monkeypatch.context() as patch:
        interrupt_at(12, patch)
        run(config)
    files = sorted(path.name for path in (config.run_dir / "checkpoints").glob("step-*.pt"))
    assert files == ["step-00000008.pt", "step-00000012.pt"]
    return config


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tiny, whole, interrupted):
    expected = whole([*tiny, "trainer.eval_every=4"])
    newest = interrupted.run_dir / "checkpoints" / "step-00000012.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    row = run(interrupted)
    assert row.warnings == ["resumed at step 8"]
    same_outcome(expected, interrupted.run_dir)


class Explosion:
    """Would leave a file behind if it were ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_checkpoint_with_objects_in_it_is_refused_and_nothing_runs(interrupted, tmp_path):
    trap = tmp_path / "executed"
    pickle.loads(pickle.dumps(Explosion(trap)))
    assert trap.exists()  # the trap works
    trap.unlink()
    for path in (interrupted.run_dir / "checkpoints").glob("step-*.pt"):
        torch.save({**torch.load(path, weights_only=True), "extra": Explosion(trap)}, path)
    with pytest.raises(
        UserError, match=r"step-00000012.pt: not a checkpoint .*holds more than tensors.*start anew with resume=never"
    ):
        run(interrupted)
    assert not trap.exists()


def test_extra_and_missing_fields_are_named(interrupted):
    for path in (interrupted.run_dir / "checkpoints").glob("step-*.pt"):
        state = torch.load(path, weights_only=True)
        torch.save({**state, "surprise": 1}, path)
    with pytest.raises(UserError, match="expected a checkpoint of format 1, found surprise; start anew"):
        run(interrupted)


def test_a_checkpoint_of_other_settings_is_refused(interrupted):
    folder = interrupted.run_dir / "checkpoints"
    with pytest.raises(UserError, match=r"belongs to a run with other settings .*lra resume .*says which differ"):
        Checkpoints(folder, "other").latest()


def test_resume_refuses_changed_settings_with_their_names(interrupted):
    run_dir = str(interrupted.run_dir)
    with pytest.raises(UserError) as caught:
        resume([run_dir, "trainer.lr=0.5", "model.dropout=0"])
    assert "model.dropout: 0.1 -> 0.0; trainer.lr: 0.001 -> 0.5: a run cannot change" in str(caught.value)
    assert "--force" in str(caught.value)
    assert not list(interrupted.run_dir.parent.glob(".replaced/*"))


def test_resume_goes_on_and_knows_what_is_finished(interrupted, capsys):
    assert resume([str(interrupted.run_dir)]) == 0
    assert results.load(interrupted.run_dir / "result.json").status in ("ok", "stuck")
    assert resume([str(interrupted.run_dir)]) == 0
    assert "finished already" in capsys.readouterr().out


def test_a_forced_change_is_a_new_run_that_tells_its_origin(interrupted):
    before = {path: path.read_bytes() for path in interrupted.run_dir.rglob("*") if path.is_file()}
    assert resume([str(interrupted.run_dir), "trainer.lr=0.002", "--force"]) == 0
    assert before == {path: path.read_bytes() for path in interrupted.run_dir.rglob("*") if path.is_file()}
    (other,) = [p for p in interrupted.run_dir.parent.glob("[!.]*") if p != interrupted.run_dir]
    row = results.load(other / "result.json")
    assert row.steps == 20
    assert f"continued from {interrupted.run_id} at step 12 with trainer.lr: 0.001 -> 0.002" in row.warnings


@pytest.mark.parametrize(
    ("text", "found"),
    [("- 1\n", "found a list"), ("[]", "found a list"), ("", "found nothing"), ("# only this\n", "found nothing"),
     ("5", "cannot be read"), ("word", "found no attention and no task"), ("attention: 3", "found no task"),
     ("attention: 3\ntask: 4", "not the configuration of a run")],
)  # fmt: skip
def test_resume_says_what_is_in_a_configuration_that_is_none(tmp_path, text, found):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"config.yaml: .*{found}"):
        resume([str(tmp_path)])


@pytest.mark.parametrize("what", ["nowhere", "renamed", "no checkpoint", "no yaml"])
def test_resume_names_what_is_wrong_with_a_directory(interrupted, tmp_path, what):
    folder = interrupted.run_dir
    if what == "nowhere":
        folder = tmp_path / "nowhere"
    elif what == "renamed":
        folder = folder.rename(folder.with_name("mine"))
    elif what == "no checkpoint":
        for path in (folder / "checkpoints").iterdir():
            path.unlink()
    else:
        (folder / "config.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match=str(folder)):
        resume([str(folder)])


def test_never_starts_anew(interrupted):
    interrupted.resume = "never"
    row = run(interrupted)
    assert row.warnings == []
    assert list(Path(interrupted.runs_dir).glob(".replaced/*"))


def test_a_damaged_metrics_file_does_not_stop_a_resume(interrupted):
    with (interrupted.run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n5\n")
    assert run(interrupted).status in ("ok", "stuck")
    assert [row["trainer/step"] for row in metrics(interrupted.run_dir)] == [4, 5, 8, 10, 12, 15, 16, 20]


def test_an_unreadable_row_does_not_cost_the_checkpoints(interrupted):
    (interrupted.run_dir / "result.json").write_text("garbage")
    assert run(interrupted).warnings == ["resumed at step 12"]


def test_damaged_best_weights_are_noticed_before_the_training(interrupted):
    for path in (interrupted.run_dir / "checkpoints").glob("best-*.pt"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match=r"best-\d+.pt: not a checkpoint .*start anew with resume=never"):
        run(interrupted)


def test_another_number_of_ranks_is_refused(interrupted):
    for path in (interrupted.run_dir / "checkpoints").glob("step-*.pt"):
        state = torch.load(path, weights_only=True)
        torch.save({**state, "rng": state["rng"] * 2}, path)
    with pytest.raises(UserError, match="2 ranks trained this run until step 12, now there are 1"):
        run(interrupted)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=32", r"model.width: 16 -> 32: the weights of the checkpoint do not fit"),
        ("task.length=32", r"does not exist .*lra data prepare"),
        ("trainer.speed=1", r"there is no key .trainer.speed.; here trainer has name . steps . epochs . "),
        ("seed", r"seed: a resumed run takes key=value"),
        ("attention=linear", r"attention=linear: a resumed run takes key=value of single options"),
    ],
)
def test_what_cannot_be_forced_leaves_nothing_behind(interrupted, override, message):
    before = sorted(interrupted.run_dir.parent.iterdir())
    with pytest.raises(UserError, match=message):
        resume([str(interrupted.run_dir), override, "--force"])
    assert sorted(interrupted.run_dir.parent.iterdir()) == before


def test_a_full_disk_is_told_and_the_run_goes_on_later(tiny, monkeypatch):
    import errno

    config = compose_run([*tiny, "trainer.eval_every=4"])
    original = os.fsync

    def full(file: int) -> None:
        if len(list((config.run_dir / "checkpoints").glob("step-*.pt"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        row = None
        with contextlib.suppress(OSError):  # the row itself may find no room
            row = run(config)
    assert row is None or (row.status, row.resumable) == ("failed", True)
    assert not list((config.run_dir / "checkpoints").glob(".*"))
    again = run(config)
    assert again.status in ("ok", "stuck")
    assert any(text.startswith("resumed at step") for text in again.warnings)
