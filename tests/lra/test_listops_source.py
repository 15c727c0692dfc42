"""ListOps rows from LRA's files: real ones are read to the letter, wrong ones named by file and line."""

import gzip
import json
from pathlib import Path

import pytest

from lra.errors import UserError
from lra.tasks.listops import Config, ListOps, decode
from tests.lra.listops_reference import value_of

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "listops" / "lra_upstream_generator_sample"


def ignore(done, total):
    """Progress that nobody watches."""


def write_source(folder, rows="( ( ( [MAX 2 ) 9 ) ] )\t9", header="Source\tTarget"):
    folder.mkdir()
    for name in ("train", "val", "test"):
        (folder / f"basic_{name}.tsv").write_bytes(f"{header}\r\n{rows}\r\n".encode())
    return Config(source=str(folder))


def test_source_rows_are_cut_and_counted(tmp_path):
    config = write_source(tmp_path / "lra", "[MAX 2 9 ]\t9\r\n[SM 1 2 3 4 ]\t0\r\n[MIN 7 8 ]\t7")
    config.length = 5
    folder = ListOps.prepare(config, tmp_path, ignore)
    info, splits = ListOps.load(config, tmp_path)
    assert [decode(splits["test"].row(i)) for i in range(3)] == ["[MAX 2 9 ]", "[SM 1 2 3 4", "[MIN 7 8 ]"]
    assert splits["test"].labels.tolist() == [9, 0, 7]
    assert info.source == f"LRA's files in {tmp_path / 'lra'}"
    details = json.loads((folder / "manifest.json").read_text())["details"]
    assert details["truncated_rows"] == {"train": 1, "validation": 1, "test": 1}
    facts = ListOps.verify(config, tmp_path)
    assert "2 labels recomputed and equal, 1 truncated rows have none" in facts[1]
    assert facts[-1] == "all splits: 6 rows repeat another"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("[MAX 2 3 ]", r"basic_train.tsv:2: expected 2 columns, found 1"),
        ("[MAX 2 3 ]\t3\tx", r"basic_train.tsv:2: expected 2 columns, found 3"),
        ("[MAX 2 3 ]\t3\r\n[MAX 2 3 ]\tthree", r"basic_train.tsv:3: expected a label 0..9, found 'three'"),
        ("[MAX 2 3 ]\t10", r"basic_train.tsv:2: expected a label 0..9, found '10'"),
        ("[MAX 2 3 ]\t", r"basic_train.tsv:2: expected a label 0..9, found ''"),
        ("[FIRST 2 3 ]\t2", r"basic_train.tsv:2: symbol '\[FIRST' is unknown"),
        ("[MAX 2 3]\t3", r"basic_train.tsv:2: symbol '3\]' is unknown"),
        ("[MAX 2 \u00e9 ]\t3", r"basic_train.tsv:2: symbol '\u00e9' is unknown"),
        ("[MAX 2 3 ]\t3\r\n[MAX 2 [MIN 3 ]\t3", r"basic_train.tsv:3: .* unbalanced: 1 are never closed"),
        ("[MAX 2 3 ] ]\t3", r"basic_train.tsv:2: .* unbalanced: '\]' at token 5 closes nothing"),
        ("[MAX ]\t3", r"basic_train.tsv:2: .* closed at token 2 has none or more than 10 arguments"),
        ("[MAX 1 2 ] 3\t3", r"basic_train.tsv:2: .* but expected one expression, found 2"),
        ("\t3", r"basic_train.tsv:2: .* but expected one expression, found 0"),
        ("[MAX 2 3 ]\t2", r"basic_train.tsv:2: expected .* value 2, but the row's value is 3; correct"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_is_named_by_file_and_line(tmp_path, rows, message):
    config = write_source(tmp_path / "lra", rows)
    with pytest.raises(UserError, match=message):
        ListOps.prepare(config, tmp_path / "data", ignore)
    assert not list((tmp_path / "data" / "listops").glob("length*"))


@pytest.mark.parametrize(
    ("header", "missing"), [("Source\tLabel", "no Target"), ("Source Target", "no Source and no Target")]
)
def test_a_missing_column_is_named(tmp_path, header, missing):
    config = write_source(tmp_path / "lra", header=header)
    with pytest.raises(UserError, match=rf"basic_train.tsv:1: expected the tab-separated columns .* found {missing};"):
        ListOps.prepare(config, tmp_path / "data", ignore)


def test_a_missing_or_empty_file_is_named(tmp_path):
    config = write_source(tmp_path / "lra")
    (tmp_path / "lra" / "basic_val.tsv").write_text("Source\tTarget\n")
    with pytest.raises(UserError, match=r"basic_val.tsv: expected rows below the header, found none"):
        ListOps.prepare(config, tmp_path / "data", ignore)
    (tmp_path / "lra" / "basic_val.tsv").unlink()
    with pytest.raises(UserError, match=r"task.source=.*: expected .* in it, found no basic_val.tsv"):
        ListOps.prepare(config, tmp_path / "data", ignore)


def test_gzip_under_the_name_of_a_tsv_is_called_so(tmp_path):
    config = write_source(tmp_path / "lra")
    path = tmp_path / "lra" / "basic_test.tsv"
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match=r"basic_test.tsv: expected text, found gzip .*; unpack it"):
        ListOps.prepare(config, tmp_path / "data", ignore)


def test_a_changed_source_is_noticed(tmp_path):
    config = write_source(tmp_path / "lra")
    ListOps.prepare(config, tmp_path, ignore)
    ListOps.prepare(config, tmp_path, ignore)
    (tmp_path / "lra" / "basic_test.tsv").write_text("Source\tTarget\n[MIN 1 2 ]\t1\n")
    with pytest.raises(
        UserError, match=r"basic_test.tsv: expected sha256 .* made from, found .*; restore it, or delete"
    ):
        ListOps.prepare(config, tmp_path, ignore)


def test_a_choice_of_rows_of_the_files(tmp_path):
    # row i has value i, so that a label tells which row it is; the last line has no end
    source = write_source(tmp_path / "lra", "\r\n".join(f"[MAX {i} {i} ]\t{i}" for i in range(10))).source
    (tmp_path / "lra/basic_val.tsv").write_text("Source\tTarget\n[MIN 1 2 ]\t1\n[MIN 2 3 ]\t2")

    def labels(**rows):
        config = Config(source=source, **rows)
        folder = ListOps.prepare(config, tmp_path, ignore)
        assert ListOps.verify(config, tmp_path)
        splits = ListOps.load(config, tmp_path)[1]
        return folder, {name: split.labels.tolist() for name, split in splits.items()}

    whole, everything = labels()
    assert everything == {"train": [*range(10)], "validation": [1, 2], "test": [*range(10)]}
    assert labels(train_rows=0, test_rows=0) == (whole, everything)
    few, four = labels(train_rows=4)
    assert few != whole
    assert four["test"] == everything["test"]
    assert len(four["train"]) == 4
    assert four["train"] == sorted(set(four["train"]))
    six = labels(train_rows=6, test_rows=4)[1]
    # a larger choice holds the smaller one, and splits of as many rows choose alike
    assert set(four["train"]) < set(six["train"])
    assert six["test"] == four["train"]
    with pytest.raises(UserError, match="task.validation_rows=3: the source has 2 rows; ask for at most as many"):
        labels(validation_rows=3)
    with pytest.raises(UserError, match=r"task.train_rows=-1: listops takes 0..1000000000"):
        labels(train_rows=-1)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real ListOps rows in {REAL}")
def test_real_rows_in_lra_format(tmp_path):
    config = Config(source=str(REAL))
    ListOps.prepare(config, tmp_path, ignore)
    info, splits = ListOps.load(config, tmp_path)
    assert info.splits == {"train": 240, "validation": 60, "test": 60}
    for name, file in (("train", "train"), ("validation", "val"), ("test", "test")):
        raw = (REAL / f"basic_{file}.tsv").read_bytes().decode()
        for i, line in enumerate(raw.split("\r\n")[1:-1]):
            source, target = line.split("\t")
            row = splits[name].row(i)
            assert value_of(source) == value_of(decode(row)) == splits[name].labels[i] == int(target)
            assert 500 < len(row) < 2000
    assert ListOps.verify(config, tmp_path)[-1] == "all splits: 0 rows repeat another"
