"""Sweeps: every cell on its own, nothing lost when one dies."""

import os
from pathlib import Path

import pytest

from lra import results, sweep
from lra.config import compose_run
from lra.errors import UserError


def rows(tmp_path: Path) -> dict[str, str]:
    return {row.attention: row.status for row in results.load_all(tmp_path / "runs")}


def test_expansion_is_the_product_in_order():
    cells = sweep.expand(["attention=flash,linear", "trainer.lr=1e-3", "seed=range(2)", "~x"])
    assert cells == [
        ["attention=flash", "trainer.lr=1e-3", "seed=0", "~x"],
        ["attention=flash", "trainer.lr=1e-3", "seed=1", "~x"],
        ["attention=linear", "trainer.lr=1e-3", "seed=0", "~x"],
        ["attention=linear", "trainer.lr=1e-3", "seed=1", "~x"],
    ]


def test_a_malformed_override_is_named():
    with pytest.raises(UserError, match="seed=\\[1,2"):
        sweep.expand(["seed=[1,2"])


@pytest.mark.parametrize("value", ["glob(*)", "interval(0,1)"])
def test_sweeps_without_values_are_refused(value):
    with pytest.raises(UserError, match="a sweep needs values"):
        sweep.expand([f"seed={value}"])


def test_repeated_cells_run_once(tiny, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "describe_cost", lambda configs: str(len(configs)))
    assert sweep.main([*tiny, "seed=0,0,1", "--dry-run"]) == 0
    assert capsys.readouterr().out.strip() == "2"


def test_a_rerun_that_dies_at_start_keeps_the_earlier_row(tiny, tmp_path, monkeypatch):
    assert sweep.main(tiny) == 0
    (before,) = results.load_all(tmp_path / "runs")
    real = sweep.subprocess.Popen
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda c, **k: real(["sh", "-c", "kill -9 $$"], **k))
    assert sweep.main([*tiny, "--rerun"]) == 1
    (kept,) = (tmp_path / "runs" / ".replaced").glob("*/result.json")
    assert results.load(kept) == before


def test_a_sweep_survives_dead_cells_and_finishes_only_what_is_left(tiny, tmp_path, monkeypatch, capfd):
    # a kernel name that exists but cannot run would be refused early; killing the process is what no code survives
    real = sweep.subprocess.Popen

    def deadly(command: list[str], **kwargs: object) -> object:
        if "attention=linear" in command:
            command = ["sh", "-c", "kill -9 $$"]
        if "attention=performer" in command:
            command = ["sh", "-c", "echo first; echo last words; exit 137"]
        return real(command, **kwargs)

    monkeypatch.setattr(sweep.subprocess, "Popen", deadly)
    arguments = [*tiny, "attention=linear,performer,flash"]
    assert sweep.main(arguments) == 1
    assert rows(tmp_path) | {"flash": "ok"} == {"linear": "failed", "performer": "failed", "flash": "ok"}
    errors = {row.attention: row.error for row in results.load_all(tmp_path / "runs")}
    assert "SIGKILL" in errors["linear"]
    assert "out-of-memory" in errors["linear"]
    assert "137" in errors["performer"]
    assert "linear listops@64 seed 0: failed: killed by SIGKILL" in capfd.readouterr().err
    monkeypatch.undo()
    started: list[list[str]] = []
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda c, **k: started.append(c) or real(c, **k))
    assert sweep.main(arguments) == 0
    assert ["attention=flash" in command for command in started] == [False, False]
    assert set(rows(tmp_path).values()) <= {"ok", "stuck"}


def test_a_failing_cell_reports_its_last_words(tiny, tmp_path):
    assert sweep.main([*tiny, "trainer.lr=1e30", "trainer.clip=0", "--fail-fast"]) == 1
    (row,) = results.load_all(tmp_path / "runs")
    assert row.status == "failed"
    assert "the loss is" in row.error


def test_nothing_starts_when_a_cell_is_misconfigured_or_data_is_missing(tiny, tmp_path):
    with pytest.raises(UserError, match="did you mean performer"):
        sweep.main([*tiny, "attention=flash,preformer"])
    with pytest.raises(UserError, match="lra data prepare"):
        sweep.main([*tiny, f"data_dir={tmp_path / 'none'}"])
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_lists_cells_and_cost(tiny, tmp_path, capsys):
    assert sweep.main([*tiny, "attention=flash,softmax", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "flash" in out
    assert "softmax" in out
    assert not (tmp_path / "runs").exists()


def test_a_row_of_an_older_run_does_not_pass_for_this_one(tiny, tmp_path):
    config = compose_run(tiny)
    cell = sweep.Cell(tiny, config)
    config.run_dir.mkdir(parents=True)
    from lra.outcome import new_row

    old = new_row(config)
    old.status = "ok"
    results.save(old, config.run_dir)
    past = 1_000_000_000
    os.utime(config.run_dir / "result.json", (past, past))
    assert sweep._settle(cell, -9, "", started=past + 100) == "failed"
    assert cell.status() == "failed"
