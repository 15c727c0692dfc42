"""Several ranks train the model of one, and score every row once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import attention
from lra import results
from lra.config import compose_run
from lra.errors import UserError
from lra.train import run

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "-m"]


def torchrun(arguments: list[str], **options: object) -> subprocess.Popen:
    command = [*TORCHRUN[:-2], "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options,
    )  # fmt: skip


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows]


@pytest.mark.slow
def test_two_ranks_follow_the_curve_of_one_for_every_mixer(tiny, tmp_path):
    # 62 test rows: an odd number of batches of 8, the last one with 6 rows
    common = [*tiny, "model.dropout=0", "trainer.steps=50", "trainer.log_every=1", "task.test_rows=62"]
    common = [o for o in common if o != "task.test_rows=64"]
    lines, singles = [], []
    data = tmp_path / "data"
    import lra.tasks

    first = compose_run([*common, f"data_dir={data}"])
    lra.tasks.load("listops").prepare(first.task, data, lambda done, total: None)
    for name in attention.REGISTRY:
        # a redraw in the middle must happen in all ranks alike
        extra = ["attention.redraw_interval=20"] if name == "performer" else []
        overrides = [*common, f"attention={name}", *extra, f"data_dir={data}"]
        config = compose_run([*overrides, f"runs_dir={tmp_path / 'one'}"])
        run(config)
        singles.append(config)
        lines.append(" ".join([*overrides, f"runs_dir={tmp_path / 'two'}"]))
    (tmp_path / "lines").write_text("\n".join(lines))
    process = torchrun(["tests.lra.rank_check", str(tmp_path / "out"), str(tmp_path / "lines")])
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output[-3000:]
    for single in singles:
        run_dir = tmp_path / "two" / single.run_id
        row, alone = (results.load(folder / "result.json") for folder in (run_dir, single.run_dir))
        assert (row.ranks, alone.ranks) == (2, 1)
        assert (row.test_labels, row.steps, row.epochs) == (62, 50, alone.epochs)
        np.testing.assert_allclose(losses(run_dir), losses(single.run_dir), atol=1e-5, err_msg=single.run_id)
        mine, other = (np.load(folder / "predictions.npz") for folder in (run_dir, single.run_dir))
        assert np.array_equal(mine["labels"], other["labels"])
        np.testing.assert_allclose(mine["log_probability"], other["log_probability"], atol=1e-3)
    assert len(list((tmp_path / "two").glob("[!.]*"))) == len(singles)


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_it_can_be_resumed(tiny, tmp_path):
    endless = [*tiny, "trainer.steps=100000", "trainer.log_every=1", "trainer.eval_every=20"]
    process = torchrun(["lra.train", *endless])
    deadline = time.monotonic() + 120
    while not any((tmp_path / "runs").glob("*/checkpoints/step-*.pt")):
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(worker(process.pid, rank=1), signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0
    (path,) = (tmp_path / "runs").glob("[!.]*/result.json")
    row = results.load(path)
    assert row.status in ("interrupted", "failed")
    assert row.steps >= 20


def worker(parent: int, rank: int) -> int:
    """Process id of a rank below the launcher."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
            status = (environ.parent / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(status[1]) == parent and f"RANK={rank}".encode() in variables:
            return int(environ.parent.name)
    raise AssertionError(f"no rank {rank} below process {parent}")


def test_too_many_ranks_for_a_batch_are_refused(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(UserError, match=r"trainer.batch_size=8 gives some of 16 ranks .* no row"):
        run(compose_run(tiny))


def test_halving_is_refused_with_ranks(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"trainer.on_oom=halve works in one process only"):
        run(compose_run([*tiny, "trainer.on_oom=halve"]))
