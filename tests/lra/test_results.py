"""Result rows: what is written comes back, and what cannot be true is refused by name."""

import json
import logging
import os
from dataclasses import asdict

import pytest

from lra import results
from lra.results import Accounts, ResultRow


def make_row(**changes):
    values = {
        "run_id": "listops-2000-flash-s0-abc",
        "status": "ok",
        "task": "listops",
        "attention": "flash",
        "seed": 0,
        "length": 2000,
        "regime": "long",
        "config_hash": "c0",
        "protocol_hash": "p0",
        "protocol": "quick",
        "test_accuracy": 0.375,
        "test_interval": [0.35, 0.4],
        "seconds": Accounts(data=1.0, compute=9.0),
        "finished": "2026-01-01T00:00:00+00:00",
    }
    return ResultRow(**{**values, **changes})


def test_round_trip(tmp_path):
    row = make_row(environment={"torch": "2.11"}, parameters=1000)
    results.save(row, tmp_path / "run")
    assert results.load(tmp_path / "run" / "result.json") == row
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["result.json"]


def test_training_time_is_data_plus_compute():
    seconds = Accounts(data=1.0, compute=9.0, evaluation=5.0, compile=7.0)
    assert make_row(seconds=seconds).train_seconds == 10.0
    assert make_row(seconds=Accounts(data=1.0)).train_seconds is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "0"}, "seed = '0', expected int"),
        ({"length": 20.5}, "length = 20.5, expected int"),
        ({"parameters": True}, "parameters = True"),
        ({"surprise": 1}, "unknown keys surprise"),
        ({"test_accuracy": 1.5}, "test_accuracy = 1.5, expected a number in"),
        ({"test_accuracy": float("nan")}, "NaN"),
        ({"step_ms": float("inf")}, "Infinity"),
        ({"peak_memory_bytes": -1}, "peak_memory_bytes = -1"),
        ({"test_interval": [0.4, 0.3]}, "test_interval"),
        ({"test_interval": ["a", "b"]}, "test_interval"),
        ({"seconds": {"lunch": 3.0}}, "unknown keys seconds.lunch"),
        ({"seconds": {"compute": "long"}}, "seconds.compute"),
        ({"seconds": None}, "NoneType"),
        ({"status": "great"}, "has status 'great', expected one of"),
        ({"schema": 99}, "has schema 99 of another version"),
        ({"parameters": 10**18 * 10}, "holds a number of 20 digits, expected one of 64 bits"),
        ({"steps": -(10**18) * 10}, "holds a number of 21 digits"),
        ({"steps": 2**63}, "holds a number of 19 digits"),
        ({"finished": "yesterday"}, "finished = 'yesterday'"),
    ],
    ids=str,
)
def test_impossible_values_are_refused(tmp_path, change, message):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**asdict(make_row()), **change}))
    with pytest.raises(ValueError, match=message):
        results.load(path)


def test_a_missing_key_is_named(tmp_path):
    raw = asdict(make_row())
    del raw["protocol_hash"]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="lacks the keys protocol_hash"):
        results.load(path)


@pytest.mark.parametrize("content", [b"", b'{"run_id": "a', b"[1]", b"\xff\xfe", b"null"])
def test_a_corrupt_file_is_skipped_by_name_and_the_rest_read(tmp_path, caplog, content):
    results.save(make_row(), tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "result.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert [row.run_id for row in results.load_all(tmp_path)] == [make_row().run_id]
    assert str(tmp_path / "bad" / "result.json") in caplog.text


def test_what_is_no_file_is_skipped_and_a_long_number_told_in_short(tmp_path, caplog):
    for name in ("pipe", "folder", "number"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe/result.json")
    (tmp_path / "folder/result.json").mkdir()
    (tmp_path / "number/result.json").write_text('{"steps": ' + "9" * 5000 + "}")
    with caplog.at_level(logging.WARNING):
        assert list(results.load_all(tmp_path)) == []
    messages = [record.getMessage().split("result.json: ")[1] for record in caplog.records]
    assert messages == ["it is not there, or no file", "it holds a number of 5000 digits, expected one of 64 bits",
                        "it is not there, or no file"]  # fmt: skip


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError):
        results.save(make_row(step_ms=float("nan")), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.md"
    results.write_atomic(path, "old ±")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.write_atomic(path, b"new")
    assert path.read_text(encoding="utf-8") == "old ±"
    assert list(tmp_path.iterdir()) == [path]


def test_times_without_a_zone_are_utc():
    early, late = make_row(finished="2026-01-01T00:00:00"), make_row(finished="2026-01-01T00:00:00-01:00")
    assert results.finished_at(make_row(finished=None)) < results.finished_at(early) < results.finished_at(late)
