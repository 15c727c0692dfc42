"""ListOps from LRA's release where it is whole, and rows with EOS as S4 has them."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lra.config import compose_run
from lra.errors import UserError
from lra.tasks.listops import Config, ListOps, decode
from tests.lra.listops_reference import value_of
from tests.lra.test_listops_data import ignore, rewrite
from tests.lra.test_listops_source import REAL, write_source
from tests.lra.test_release import write_archive

SMALL = {"length": 64, "train_rows": 300, "validation_rows": 40, "test_rows": 50}
EOS = 16


@pytest.fixture
def with_release(tmp_path):
    """A data folder with a release in it."""
    (tmp_path / "lra_release/lra_release").mkdir(parents=True)
    write_source(tmp_path / "lra_release/lra_release/listops-1000", "[MAX 2 9 ]\t9\r\n[SM 1 2 3 4 ]\t0")
    return tmp_path


def test_auto_takes_the_release_at_its_own_length_only(with_release):
    def source(**options):
        return ListOps.resolved(Config(**options), with_release).source

    assert source() == source(length=2000) == source(fidelity="s4") == "release"
    assert source(fidelity="s4", length=2048) == "release"
    for options in ({"length": 1999}, {"length": 2048}, {"length": 256, "fidelity": "s4"}, {"seed": 1}):
        assert source(**options) == "generated"
    assert source(train_rows=500) == source(max_depth=9) == source(source="generated") == "generated"
    assert ListOps.resolved(Config(), with_release / "elsewhere").source == "generated"
    # an archive is taken, too, and not opened to find out
    (with_release / "packed").mkdir()
    (with_release / "packed/lra_release.gz").touch()
    assert ListOps.resolved(Config(), with_release / "packed").source == "release"


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_rows_of_the_release(with_release, tmp_path, form):
    data, config = with_release, Config()
    if form == "archive":
        data = tmp_path / "packed"
        data.mkdir()
        inner = with_release / "lra_release/lra_release/listops-1000"
        members = {f"lra_release/lra_release/listops-1000/{p.name}": p.read_bytes() for p in inner.iterdir()}
        write_archive(data / "lra_release.gz", members)
    folder = ListOps.prepare(config, data, ignore)
    assert folder == data / "listops" / "length2000-release-v1"
    info, splits = ListOps.load(config, data)
    assert info.splits == {"train": 2, "validation": 2, "test": 2}
    assert [decode(splits["test"].row(i)) for i in range(2)] == ["[MAX 2 9 ]", "[SM 1 2 3 4 ]"]
    details = json.loads((folder / "manifest.json").read_text())["details"]
    assert details["source"].endswith("listops-1000")
    assert set(details["source_files"]) == {"basic_train.tsv", "basic_val.tsv", "basic_test.tsv"}
    assert "2 labels recomputed and equal" in ListOps.verify(config, data)[1]
    assert ListOps.prepare(config, data, ignore) == folder
    # what was unpacked may go, and is not unpacked again only to be compared
    shutil.rmtree(data / "unpacked", ignore_errors=True)
    assert ListOps.prepare(config, data, ignore) == folder
    assert not (data / "unpacked").exists()


def test_the_release_can_be_named_by_its_place(with_release, tmp_path):
    config = Config(source=str(with_release / "lra_release"))
    ListOps.prepare(config, tmp_path / "data", ignore)
    assert ListOps.load(config, tmp_path / "data")[0].splits["train"] == 2


def test_what_the_release_cannot_give_is_refused(with_release, tmp_path):
    for options in ({"length": 256}, {"length": 2048}):
        with pytest.raises(UserError, match=r"task.length=\d+: LRA's release has rows of 501 to 1999 tokens; give"):
            ListOps.prepare(Config(source="release", **options), with_release, ignore)
    with pytest.raises(UserError, match=r"task.seed is for generated rows"):
        ListOps.prepare(Config(source="release", seed=1), with_release, ignore)
    with pytest.raises(UserError, match=r"task.source=release: expected LRA's release in .*/none, found none; put"):
        ListOps.prepare(Config(source="release"), tmp_path / "none", ignore)


def test_every_generated_row_has_an_eos_and_is_otherwise_the_same(tmp_path):
    plain, with_eos = Config(**SMALL), Config(**SMALL, fidelity="s4")
    assert ListOps.prepare(with_eos, tmp_path, ignore).name.startswith("length64-s4-generated-")
    ListOps.prepare(plain, tmp_path, ignore)
    before, after = ListOps.load(plain, tmp_path), ListOps.load(with_eos, tmp_path)
    # pad, 15 symbols, EOS, and S4's unknown symbol
    assert (before[0].vocab_size, after[0].vocab_size, after[0].fidelity) == (16, 18, "s4")
    for name, split in after[1].items():
        assert split.labels.tolist() == before[1][name].labels.tolist()
        assert split.lengths.max() <= 64
        for i in range(len(split)):
            assert split.row(i).tolist() == [*before[1][name].row(i).tolist(), EOS]
            assert value_of(decode(split.row(i))) == split.labels[i]
    assert "300 labels recomputed and equal" in ListOps.verify(with_eos, tmp_path)[1]


def test_the_length_of_s4_holds_the_rows_of_lra(tmp_path):
    rows = {"train_rows": 20, "validation_rows": 5, "test_rows": 5}
    ListOps.prepare(Config(**rows), tmp_path, ignore)
    ListOps.prepare(Config(**rows, fidelity="s4", length=2048), tmp_path, ignore)
    lra = ListOps.load(Config(**rows), tmp_path)[1]["train"]
    s4 = ListOps.load(Config(**rows, fidelity="s4", length=2048), tmp_path)[1]["train"]
    assert s4.lengths.tolist() == (lra.lengths + 1).tolist()
    assert ListOps.verify(Config(**rows, fidelity="s4", length=2048), tmp_path)


def test_verify_finds_a_row_without_eos(tmp_path):
    config = Config(**SMALL, fidelity="s4")
    folder = ListOps.prepare(config, tmp_path, ignore)
    tokens = np.fromfile(folder / "test.tokens.bin", "u1")
    rewrite(folder, "test", "tokens", np.where(np.arange(len(tokens)) == len(tokens) - 1, 5, tokens).tobytes())
    with pytest.raises(UserError, match="expected EOS as the last token of each row of test and nowhere else"):
        ListOps.verify(config, tmp_path)


def test_rows_of_files_are_cut_before_their_eos(tmp_path):
    source = write_source(tmp_path / "lra", "[MAX 2 9 ]\t9\r\n[SM 1 2 3 4 ]\t0").source
    config = Config(source=source, fidelity="s4", length=5)
    ListOps.prepare(config, tmp_path, ignore)
    split = ListOps.load(config, tmp_path)[1]["test"]
    assert [split.row(i).tolist() for i in range(2)] == [[2, 8, 15, 5, EOS], [4, 7, 8, 9, EOS]]
    assert "1 labels recomputed and equal, 1 truncated rows have none" in ListOps.verify(config, tmp_path)[1]
    with pytest.raises(UserError, match=re.escape("task.length=1: listops takes 2..32768")):
        ListOps.prepare(Config(source=source, fidelity="s4", length=1), tmp_path, ignore)


def test_the_resolved_configuration_names_the_source(with_release):
    assert compose_run(["task=listops", f"data_dir={with_release}"]).task.source == "release"
    assert compose_run(["task=listops", f"data_dir={with_release}", "regime=short"]).task.source == "generated"


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real ListOps rows in {REAL}")
def test_real_rows_in_a_release(tmp_path):
    (tmp_path / "lra_release").mkdir()
    (tmp_path / "lra_release/listops-1000").symlink_to(Path(REAL))
    config = Config(fidelity="s4", length=2048)
    ListOps.prepare(config, tmp_path, ignore)
    info, splits = ListOps.load(config, tmp_path)
    assert info.splits == {"train": 240, "validation": 60, "test": 60}
    raw = (REAL / "basic_val.tsv").read_bytes().decode().split("\r\n")[1:-1]
    assert [value_of(row.split("\t")[0]) for row in raw] == splits["validation"].labels.tolist()
    assert "240 labels recomputed and equal" in ListOps.verify(config, tmp_path)[1]
