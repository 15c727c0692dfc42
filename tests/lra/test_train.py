"""One run from configuration to row: complete, repeatable, honest about failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import attention
from lra import results
from lra.config import compose_run
from lra.errors import UserError
from lra.run_dir import only_process
from lra.train import run
from lra.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(run_dir: Path) -> list[tuple]:
    keys = ("trainer/step", "train/loss", "train/gradient_norm", "val/loss", "val/accuracy")
    return [tuple(row.get(k) for k in keys) for row in metrics(run_dir)]


def best_file(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("best-*.pt"))


def train(arguments: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lra.train", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_every_backend_leaves_a_complete_row(tiny, name):
    config = compose_run([*tiny, f"attention={name}"])
    row = run(config)
    assert row == results.load(config.run_dir / "result.json")
    assert row.status in ("ok", "stuck")
    assert row.error is None
    assert (row.steps, row.batch_size, row.test_labels) == (20, 8, 64)
    assert row.epochs == 20 * 8 / 256
    assert 0 < row.parameters < 10_000
    assert row.kernel in attention.kernels.available(attention.load(name).op, config.device)
    low, high = row.test_interval
    assert low <= row.test_accuracy <= high
    assert (row.test_accuracy * 64) % 1 == 0
    assert (row.validation_accuracy * 64) % 1 == 0
    assert row.selected_step in (10, 20)
    assert row.step_ms > 0
    assert row.warmup_steps_dropped == 5
    assert row.seconds.compute > 0
    assert row.peak_memory_bytes is None or row.peak_memory_bytes > 0
    assert row.regime == "short"
    assert row.direction == "bidirectional"
    saved = yaml.safe_load((config.run_dir / "config.yaml").read_text())
    assert saved["attention"]["name"] == name


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_a_seed_gives_the_same_curve_twice(tiny, tmp_path, name):
    curves = []
    for folder in ("a", "b"):
        config = compose_run([*tiny, f"attention={name}", f"runs_dir={tmp_path / folder}"])
        run(config)
        curves.append(curve(config.run_dir))
    assert curves[0] == curves[1]
    assert [line[0] for line in curves[0]] == [5, 10, 15, 20]


def test_another_seed_gives_another_curve(tiny, tmp_path):
    first, second = (compose_run([*tiny, f"seed={seed}"]) for seed in (0, 1))
    run(first)
    run(second)
    assert curve(first.run_dir) != curve(second.run_dir)


def test_accumulation_gives_the_gradient_of_the_whole_batch(tiny):
    whole = compose_run([*tiny, "model.dropout=0"])
    parts = compose_run([*tiny, "model.dropout=0", "trainer.accumulation=4"])
    run(whole)
    run(parts)
    for a, b in zip(metrics(whole.run_dir), metrics(parts.run_dir)):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
            assert a["train/gradient_norm"] == pytest.approx(b["train/gradient_norm"], rel=1e-3)


def test_the_test_split_is_read_once_at_the_selected_weights(tiny, monkeypatch):
    calls = []
    original = Trainer.predict

    def spy(self: Trainer, split: str) -> object:
        predictions = original(self, split)
        calls.append((split, predictions.score(10)))
        return predictions

    monkeypatch.setattr(Trainer, "predict", spy)
    config = compose_run(tiny)
    row = run(config)
    assert [split for split, _ in calls] == ["validation", "validation", "test"]
    validations = {10: calls[0][1], 20: calls[1][1]}
    assert row.validation_accuracy == max(score.accuracy for score in validations.values())
    assert validations[row.selected_step].accuracy == row.validation_accuracy
    # the weights on disk, loaded into a fresh model in another way, give the reported accuracy
    saved = torch.load(best_file(config.run_dir), weights_only=True)
    assert saved["step"] == row.selected_step


def test_it_learns_what_is_there_to_learn(tiny, tmp_path):
    # about five passes over 256 rows without dropout must drive the training loss down
    config = compose_run([*tiny, "trainer.steps=150", "trainer.lr=0.01", "task.train_rows=256", "model.dropout=0"])
    run(config)
    losses = [row["train/loss"] for row in metrics(config.run_dir) if "train/loss" in row]
    assert sum(losses[-5:]) / 5 < 0.9 * losses[0]


def test_a_diverging_run_fails_with_the_step_and_the_way_out(tiny):
    config = compose_run([*tiny, "trainer.lr=1e30", "trainer.clip=0"])
    row = run(config)
    assert row.status == "failed"
    assert "the loss is" in row.error
    assert "at step" in row.error
    assert row.test_accuracy is None
    assert "Traceback" in (config.run_dir / "train.log").read_text()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_emulated_bf16_is_a_warning_in_the_result(tiny, monkeypatch, caplog, precision):
    monkeypatch.setattr("lra.train.EMULATES_HALF", True)
    row = run(compose_run([*tiny, "device=cpu", "trainer.steps=6", f"trainer.precision={precision}"]))
    said = [text for text in (*row.warnings, *caplog.messages) if "no bf16 arithmetic" in text]
    assert len(said) == (3 if precision == "bf16" else 0)  # in the row, when it starts and when it ends


def test_running_out_of_memory_is_a_result(tiny, monkeypatch):
    def explode(*args: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 8 GiB")

    monkeypatch.setattr(Trainer, "_step", explode)
    row = run(compose_run(tiny))
    assert row.status == "oom"
    assert row.error.endswith("tried to allocate 8 GiB")
    assert row.step_ms is None


def test_an_earlier_run_of_the_same_name_is_kept(tiny):
    config = compose_run(tiny)
    first = run(config)
    second = run(config)
    kept = list((Path(config.runs_dir) / ".replaced").glob("*/result.json"))
    assert len(kept) == 1
    assert results.load(kept[0]) == first
    assert [r.run_id for r in results.load_all(Path(config.runs_dir))] == [second.run_id]


def test_two_processes_never_share_a_run(tiny, tmp_path):
    config = compose_run(tiny)
    with only_process(config), pytest.raises(UserError, match="another process is at this run"):
        run(config)
    assert not config.run_dir.exists()
    assert run(config).status in ("ok", "stuck")


def test_missing_data_names_the_command_and_creates_nothing(tiny, tmp_path):
    config = compose_run([*tiny, f"data_dir={tmp_path / 'nowhere'}"])
    with pytest.raises(UserError, match="lra data prepare listops"):
        run(config)
    assert not Path(config.runs_dir).exists()


def test_a_runs_folder_that_cannot_be_made_is_named(tiny, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UserError, match="runs_dir="):
        run(compose_run([*tiny, f"runs_dir={blocker}"]))


def test_the_command_reports_in_one_line_and_by_exit_code(tiny):
    done = train(tiny)
    assert done.returncode == 0
    assert "test accuracy" in done.stderr
    bad = train([*tiny, "attention=preformer"])
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.strip().splitlines() == [
        "error: attention=preformer is unknown; choose "
        f"{' | '.join(sorted(attention.REGISTRY))}; did you mean performer?"
    ]


def test_multirun_goes_on_after_a_failed_cell(tiny, tmp_path):
    done = train(["-m", *tiny, "trainer.clip=0", "trainer.lr=1e30,1e-3"])
    assert done.returncode == 1
    rows = list(results.load_all(tmp_path / "runs"))
    assert sorted(row.status in ("ok", "stuck") for row in rows) == [False, True]
    assert "the loss is" in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_an_interrupted_row(tiny, tmp_path, sent):
    arguments = [*tiny, "trainer.steps=100000", "trainer.warmup=5", "trainer.log_every=1"]
    process = subprocess.Popen([sys.executable, "-m", "lra.train", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any((tmp_path / "runs").glob("*/checkpoints/best-*.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, sent)
    assert process.wait(timeout=30) == 130
    (row,) = results.load_all(tmp_path / "runs")
    assert row.status == "interrupted"
    assert row.steps > 0
    assert row.test_accuracy is None
