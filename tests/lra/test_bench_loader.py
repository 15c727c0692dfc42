"""The loader's benchmark compares equal batches."""

import numpy as np
import pytest

import lra.tasks
from lra import bench_loader
from lra.bench_loader import measure
from lra.config import compose_run
from lra.data.arrays import Split


@pytest.mark.parametrize("documents", [1, 2])
def test_both_pipelines_make_the_same_batches(documents):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 100 * documents)
    tokens = rng.integers(1, 200, lengths.sum()).astype(np.uint8)
    split = Split(tokens, np.concatenate([[0], np.cumsum(lengths)]), np.arange(100) % 2, documents)
    line = measure("toy", 40, split, batch_size=8, batches=10).split()
    assert line[:2] == ["toy", "40"]
    assert float(line[5]) > 0


def test_what_is_not_prepared_is_left_out_or_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LRA_DATA_DIR", str(tmp_path))
    rows = [f"task.{key}_rows={count}" for key, count in {"train": 40, "validation": 2, "test": 2}.items()]
    config = compose_run(["task=copying", "task.length=64", *rows])
    lra.tasks.load("copying").prepare(config.task, tmp_path, lambda done, total: None)
    options = [word for row in ("task.length=64", *rows) for word in ("--override", row)]
    monkeypatch.setattr("sys.argv", ["scripts/bench_loader", "--batch-size=4", "--batches=3", *options])
    assert bench_loader.main() == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["task", "copying"]
    assert [line.split()[0] for line in captured.err.splitlines()] == [n for n in lra.tasks.REGISTRY if n != "copying"]
    monkeypatch.setattr("sys.argv", ["scripts/bench_loader", "listops", *options])
    assert bench_loader.main() == 2
    assert "run `lra data prepare listops" in capsys.readouterr().err
