"""Tracking: the file is the truth, W&B is a mirror that may break, nothing ever asks or waits."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lra import results, tracking
from lra.config import compose_run
from lra.tracking import Tracker, wandb_mode
from lra.train import run

ROOT = Path(__file__).resolve().parents[2]


def test_the_mode_follows_key_and_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE")
    assert wandb_mode("auto")[0] == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode("auto")[0] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto")[0] == "disabled"
    assert wandb_mode("offline")[0] == "offline"


def test_a_key_in_netrc_counts(monkeypatch, tmp_path):
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password secret\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    assert tracking.has_key()


def test_offline_runs_mirror_every_row(tiny, tmp_path):
    config = compose_run([*tiny, "tracking=offline"])
    row = run(config)
    (transaction_log,) = config.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    summary = json.loads(inspect("--summary", "--json", str(transaction_log)))
    assert summary["state"] == "finished"
    assert summary["summary"]["test/accuracy"] == pytest.approx(row.test_accuracy)
    assert summary["config"]["attention_name"] == "flash"


def inspect(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_failed_run_is_marked_failed_and_its_row_comes_first(tiny):
    config = compose_run([*tiny, "tracking=offline", "trainer.lr=1e30", "trainer.clip=0"])
    run(config)
    (transaction_log,) = config.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert json.loads(inspect("--summary", "--json", str(transaction_log)))["state"] == "failed"


def test_tracking_never_changes_a_result(tiny, tmp_path):
    curves = []
    for mode in ("offline", "disabled"):
        config = compose_run([*tiny, f"tracking={mode}", f"runs_dir={tmp_path / mode}"])
        run(config)
        lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
        curves.append([{k: v for k, v in json.loads(x).items() if "perf" not in k} for x in lines])
    assert curves[0] == curves[1]


def test_a_key_without_a_server_falls_back_offline_with_one_line(tiny, tmp_path):
    code = "import sys, lra.tracking, lra.train; lra.tracking.INIT_TIMEOUT_SECONDS = 3; sys.exit(lra.train.main())"
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"}
    # nothing listens on the discard port
    environment |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *tiny, "tracking=auto"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    # W&B alone would wait for 90 s
    assert time.monotonic() - start < 60
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "W&B" in line or "wandb" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("W&B: offline, the server did not answer")
    (row,) = results.load_all(tmp_path / "runs")
    assert row.status in ("ok", "stuck")


def test_a_broken_mirror_is_dropped(tiny, tmp_path):
    class Broken:
        def log(self, row: dict) -> None:
            raise RuntimeError("disk full")

    tracker = Tracker(compose_run(tiny), tmp_path)
    tracker._run = Broken()
    with tracker:
        tracker.log(1, {"train/loss": 2.0})
        tracker.log(2, {"train/loss": float("nan")})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"trainer/step": 1, "train/loss": 2.0}, {"trainer/step": 2, "train/loss": None}]


def test_metrics_are_on_disk_before_the_mirror_sees_them(tiny, tmp_path):
    seen = []

    class Spy:
        def log(self, row: dict) -> None:
            seen.append((tmp_path / "metrics.jsonl").read_text())

        def finish(self, exit_code: int) -> None:
            seen.append(exit_code)

    tracker = Tracker(compose_run(tiny), tmp_path)
    tracker._run = Spy()
    with tracker:
        tracker.log(7, {"val/accuracy": 0.5})
    assert json.loads(seen[0]) == {"trainer/step": 7, "val/accuracy": 0.5}
    assert seen[1] == 0


def test_results_reach_the_disk_before_the_tracker_closes(tiny, monkeypatch):
    order = []
    save, close = results.save, Tracker.__exit__
    monkeypatch.setattr(results, "save", lambda *a: order.append("row") or save(*a))
    monkeypatch.setattr(Tracker, "__exit__", lambda *a: order.append("tracker") or close(*a))
    run(compose_run(tiny))
    assert order == ["row", "tracker"]


def test_a_resumed_run_is_one_run_with_rising_steps(tiny, monkeypatch):
    from lra.trainer import Trainer

    config = compose_run([*tiny, "tracking=offline", "trainer.log_every=1", "trainer.eval_every=4"])
    original = Trainer._step

    def stepping(self: Trainer, number: int, *rest: object) -> tuple[float, float]:
        self.stop.requested = number == 10
        return original(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stepping)
        assert run(config).status == "interrupted"
    run(config)
    (transaction_log,) = config.run_dir.glob("wandb/offline-run-*/run-*.wandb")
    text = inspect("--json", str(transaction_log))
    steps = [int(step) for step in re.findall(r'"trainer/step"\s*:\s*"?(\d+)"?', text)]
    assert set(range(1, 21)) <= set(steps)
    assert json.loads(inspect("--summary", "--json", str(transaction_log)))["state"] == "finished"
