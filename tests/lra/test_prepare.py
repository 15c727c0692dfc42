"""``lra data``: what it lists, and that an interruption is polite."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lra import prepare
from lra.errors import UserError
from lra.tasks.text import Text
from tests.conftest import TINY
from tests.lra.reviews import some, write_hub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch, tmp_path):
    monkeypatch.delenv("LRA_HUB_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def listing(tmp_path, capsys):
    """Lines of ``lra data list`` for a data folder."""

    def lines(*words):
        assert prepare.main(["list", f"data_dir={tmp_path}", *words]) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def fill(tmp_path):
    copy = write_hub(tmp_path / "copy", {"train": some(200), "test": some(60, start=1000)})
    assert prepare.main(["prepare", "listops", f"data_dir={tmp_path}", *TINY]) == 0
    assert prepare.main(["prepare", "text", f"data_dir={tmp_path}", f"task.source={copy}"]) == 0
    return copy


def test_lists_rows_size_origin_and_exactness_in_columns(tmp_path, listing, capsys):
    copy = fill(tmp_path)
    capsys.readouterr()
    lines = listing("listops", "text")
    assert lines[0] == f"in {tmp_path}"
    header, listops, origin, text, reviews = lines[2:]
    assert listops.split()[0] == "listops"
    assert listops.split()[1:4] == ["256", "64", "64"]
    assert text.split()[1:4] == ["180", "20", "60"]
    assert origin.strip().startswith("generated with seed 0; distribution of LRA's generator")
    assert reviews.strip() == f"parquet files in {copy}; not the published reviews"
    # right edges of the numbers stand under those of their names
    for word, number in (("train", " 180"), ("validation", " 20"), ("test", " 60")):
        assert header.index(word) + len(word) == text.index(number) + len(number)
    size = sum(path.stat().st_size for path in Path(tmp_path / "text" / text.split()[5]).iterdir())
    assert float(text.split()[4]) == pytest.approx(size / 2**20, abs=0.05)


def test_says_what_is_needed_for_what_is_not_prepared(tmp_path, listing):
    _, _, _, listops, text, needs = listing("listops", "text")
    assert "`lra data prepare listops data_dir=" in listops
    assert listops.endswith("needs nothing that is not here")
    assert text.startswith("text        not prepared; `lra data prepare text data_dir=")
    assert "stanfordnlp/imdb from the Hugging Face Hub" in needs
    assert f"train-*.parquet and test-*.parquet in {tmp_path}/hub/stanfordnlp/imdb" in needs
    write_hub(tmp_path / "hub/stanfordnlp/imdb", {"train": some(20), "test": some(20)})
    assert listing("text")[-1].endswith("needs nothing that is not here")
    (tmp_path / "hub/stanfordnlp/imdb/plain_text/test-00000-of-00001.parquet").unlink()
    assert r"expected test-*.parquet in it" in listing("text")[-1]


@pytest.mark.parametrize("words", [["x=1"], ["regime=short"], ["task.length=64"], ["task.lenght=64", "+data_dir=a"]])
def test_list_refuses_what_it_does_not_use(tmp_path, words, capsys):
    (tmp_path / "listops/length16-v1").mkdir(parents=True)
    for tasks in ([], ["listops"], ["copying"]):  # of some, one, and none of them there is a folder
        with pytest.raises(UserError, match=rf"^{re.escape(' '.join(words))}: lra data list takes names of tasks and"):
            prepare.main(["list", f"data_dir={tmp_path}", *tasks, *words])
    assert capsys.readouterr().out == ""


def test_tells_what_is_damaged_and_what_is_of_another_version(tmp_path, listing, monkeypatch):
    fill(tmp_path)
    monkeypatch.setattr(Text, "VERSION", "2")
    path = next((tmp_path / "listops").glob("[!.]*/manifest.json"))
    path.write_text(json.dumps({"splits": {}}))
    lines = listing("listops", "text")
    assert "damaged" in lines[-3]
    assert "of version 1, which is no longer read" in lines[-1]


def test_lists_a_newer_format_and_a_folder_without_manifest_as_what_they_are(tmp_path, listing):
    fill(tmp_path)
    path = next((tmp_path / "listops").glob("[!.]*/manifest.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert listing("listops")[-1].strip() == "of format 99, where this program reads 2: delete it"
    path.unlink()
    assert listing("listops")[-1].strip() == "damaged: delete it and prepare it again"
    os.mkfifo(path)
    assert listing("listops")[-1].strip() == "damaged: delete it and prepare it again"
    with pytest.raises(UserError, match="manifest.json: expected a manifest, found no file; delete or move"):
        prepare.main(["verify", "listops", f"data_dir={tmp_path}", *TINY])


@pytest.mark.parametrize(
    "details",
    [{"source": None}, {"exact": []}, {"source_files": [1]}, {"truncated_rows": [1]}],
    ids=lambda details: next(iter(details)),
)
def test_damaged_details_of_a_manifest_are_one_error(tmp_path, details):
    words = ["listops", f"data_dir={tmp_path}", *TINY]
    assert prepare.main(["prepare", *words]) == 0
    path = next((tmp_path / "listops").glob("[!.]*/manifest.json"))
    manifest = json.loads(path.read_text())
    manifest["details"].update(details)
    path.write_text(json.dumps(manifest))
    # only the proof asks for the number of truncated rows
    for action in ("verify",) if "truncated_rows" in details else ("verify", "prepare"):
        with pytest.raises(UserError, match="manifest.json: its details lack what the task needs .*; delete or move"):
            prepare.main([action, *words])


def test_an_interrupted_prepare_says_so_in_one_line(tmp_path):
    command = [sys.executable, "-m", "lra.cli", "data", "prepare", "listops", f"data_dir={tmp_path}"]
    # a shell that starts the tests in the background has interrupts ignored, and children inherit that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    # the rows of LRA's size take minutes; the folder under construction shows that it began
    while process.poll() is None and not list(tmp_path.glob("listops/.*.partial/train.*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == ["interrupted: nothing was left half-written; the same command starts again"]
    assert not list(tmp_path.glob("listops/*length*"))
