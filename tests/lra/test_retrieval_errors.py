"""Retrieval files that are wrong are named by file and line; altered arrays are found; a run through the commands."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lra.errors import UserError
from lra.tasks import retrieval_source
from lra.tasks.retrieval import Retrieval
from tests.lra.retrieval_files import ignore, prepared, write_source
from tests.lra.test_listops_data import rewrite
from tests.lra.test_retrieval import REAL, ROOT, needs_real

GOOD = b"0.0\ta\tb\tone\ttwo"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([b"0.0\ta\tb\tone two"], r"train.tsv:1: expected 5 tab-separated columns \(label, id1, .* text2\), found 4"),
        ([GOOD, b"0.0 a b one two"], r"train.tsv:2: expected 5 tab-separated columns .*, found 1"),
        ([GOOD, b"0.0\ta\tb\ttab\tin\ttext"], r"train.tsv:2: expected 5 .*, found 6"),
        ([GOOD, b"1.0\ta\tb"], r"train.tsv:2: expected 5 .*, found 3"),
        ([GOOD, b""], r"train.tsv:2: expected 5 .*, found 1"),
        ([GOOD, b"x\ta\tb\tone\ttwo"], r"train.tsv:2: expected a label 0 or 1, found 'x'; correct"),
        ([GOOD, b"2\ta\tb\tone\ttwo"], r"train.tsv:2: expected a label 0 or 1, found '2'"),
        ([GOOD, b"0.5\ta\tb\tone\ttwo"], r"train.tsv:2: expected a label 0 or 1, found '0.5'"),
        ([GOOD, b"nan\ta\tb\tone\ttwo"], r"train.tsv:2: expected a label 0 or 1, found 'nan'"),
        ([GOOD, b"\ta\tb\tone\ttwo"], r"train.tsv:2: expected a label 0 or 1, found ''"),
        ([b"\xef\xbb\xbf0.0\ta\tb\tone\ttwo"], r"train.tsv:1: expected a label 0 or 1, found '\\ufeff0.0'"),
        ([b"label\tid1\tid2\ttext1\ttext2"], r"train.tsv:1: expected a label 0 or 1, found 'label'"),
        ([b"\xff\ta\tb\tone\ttwo"], r"train.tsv:1: expected a label 0 or 1, found '\\+xff'"),
        ([], r"train.tsv: expected rows, found an empty file; get it again"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_is_named_by_file_and_line(tmp_path, rows, message):
    config = write_source(tmp_path / "in", rows)
    with pytest.raises(UserError, match=message):
        Retrieval.prepare(config, tmp_path / "data", ignore)
    assert not list((tmp_path / "data" / "retrieval").glob("length*"))


@pytest.mark.parametrize("label", [b"1", b"1.0", b"1.00", b"1e0", b" 1.0"])
def test_labels_are_floats(tmp_path, label):
    _, splits = prepared(write_source(tmp_path / "in", [label + GOOD[3:]]), tmp_path)
    assert splits["test"].labels.tolist() == [1]


def test_a_row_that_is_not_chosen_is_checked_too(tmp_path):
    config = write_source(tmp_path / "in", [GOOD] * 20 + [b"3" + GOOD[3:]], train_rows=1)
    with pytest.raises(UserError, match="train.tsv:21: expected a label"):
        Retrieval.prepare(config, tmp_path, ignore)


def test_a_missing_file_is_named(tmp_path):
    config = write_source(tmp_path / "in", [GOOD])
    (tmp_path / "in" / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(UserError, match=r"task.source=.*/in: expected new_aan_pairs.train.tsv, .* found no .*eval.tsv"):
        Retrieval.prepare(config, tmp_path, ignore)


@pytest.mark.parametrize("papers", [False, True])
def test_gzip_under_the_name_of_a_tsv_is_called_so(tmp_path, papers):
    config = write_source(tmp_path / "in", [GOOD])
    path = tmp_path / "in" / "new_aan_pairs.eval.tsv"
    path.write_bytes(gzip.compress(path.read_bytes()))
    if papers:
        (tmp_path / "in" / "papers_text").mkdir()
    with pytest.raises(UserError, match=r"eval.tsv: expected text, found gzip .*; unpack it"):
        Retrieval.prepare(config, tmp_path, ignore)


def test_a_file_without_line_ends_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval_source, "MOST_LINE", 100)
    config = write_source(tmp_path / "in", [GOOD, b"1.0\ta\tb\tone\t" + b"x" * 100])
    with pytest.raises(UserError, match=r"train.tsv:2: expected a row, found a line over 100 bytes"):
        Retrieval.prepare(config, tmp_path, ignore)


@pytest.mark.parametrize("name", [b"", b"../secret", b"a\0b"])
def test_an_id_is_no_path(tmp_path, name):
    config = write_source(tmp_path / "in", [b"0.0\t%s\tP2" % name])
    (tmp_path / "in" / "papers_text").mkdir()
    (tmp_path / "in" / "secret.txt").write_text("secret")
    with pytest.raises(UserError, match=r"train.tsv:1: expected the id of a paper, found '"):
        Retrieval.prepare(config, tmp_path, ignore)


def test_verify_finds_other_labels_and_other_texts(tmp_path):
    config = write_source(tmp_path / "in", [GOOD, b"1.0" + GOOD[3:]])
    prepared(config, tmp_path)
    folder = Retrieval.folder(config, tmp_path)
    tokens = np.fromfile(folder / "test.tokens.bin", "<u2")
    rewrite(folder, "test", "labels", np.array([1, 0], "<i8").tobytes())
    with pytest.raises(UserError, match=r"expected row 0 of test to have label 0 of .*test.tsv:1, found 1"):
        Retrieval.verify(config, tmp_path)
    rewrite(folder, "test", "labels", np.array([0, 1], "<i8").tobytes())
    changed = tokens.copy()
    changed[-1] += 1
    rewrite(folder, "test", "tokens", changed.tobytes())
    with pytest.raises(
        UserError, match=r"expected row 1 of test to hold the texts of .*test.tsv:2, found other tokens"
    ):
        Retrieval.verify(config, tmp_path)
    changed[-1] = 300
    rewrite(folder, "test", "tokens", changed.tobytes())
    with pytest.raises(UserError, match=r"expected tokens of a text in row 1 of test, found ids that no text has"):
        Retrieval.verify(config, tmp_path)


@pytest.mark.parametrize("fidelity", ["lra", "s4"])
def test_verify_says_so_when_the_source_is_gone(tmp_path, fidelity):
    config = write_source(tmp_path / "in", [GOOD], fidelity=fidelity)
    prepared(config, tmp_path)
    (tmp_path / "in").rename(tmp_path / "out")
    assert "tokens of 1 rows are text;" in Retrieval.verify(config, tmp_path)[2]
    assert "is gone, so that labels are only counted" in Retrieval.verify(config, tmp_path)[2]
    # and the copy stays valid
    Retrieval.prepare(config, tmp_path, ignore)


def command(*words, folder):
    places = {"PYTHONPATH": str(ROOT), "LRA_DATA_DIR": str(folder / "data"), "LRA_RUNS_DIR": str(folder / "runs")}
    return subprocess.run(
        [sys.executable, "-m", "lra.cli", *words],
        env=os.environ | places,
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip


@needs_real
@pytest.mark.slow
def test_prepare_verify_and_train_by_command(tmp_path):
    task = [f"task.source={REAL}", "task.length=500"]
    for action in ("prepare", "verify"):
        done = command("data", action, "retrieval", *task, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    size = ["trainer=smoke", "model.width=16", "model.ffn_width=16", "tracking=disabled"]
    done = command("train", "task=retrieval", "attention=linear", *task, *size, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "runs").glob("retrieval-500-linear-*/result.json")
    row = json.loads(result.read_text())
    assert row["status"] in ("ok", "stuck")
    assert (row["steps"], row["rows"], row["test_labels"]) == (20, {"train": 24, "validation": 8, "test": 8}, 8)
    assert row["majority_baseline"] == 0.5


@pytest.mark.slow
def test_a_missing_release_ends_with_one_line(tmp_path):
    done = command("data", "prepare", "retrieval", folder=tmp_path)
    assert done.returncode == 2
    assert "put the file lra_release.gz" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
