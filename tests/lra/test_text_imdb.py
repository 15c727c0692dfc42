"""The real IMDb reviews, where they are beside the checkout: published counts and lengths, trees, training."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from lra.tasks.text import Config, Text
from tests.lra.reviews import REAL, real

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A data folder with the reviews where a mirror of the Hub has them."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "hub/stanfordnlp").mkdir(parents=True)
    (folder / "hub/stanfordnlp/imdb").symlink_to(real())
    return folder


@pytest.fixture(autouse=True)
def no_other_mirror(monkeypatch):
    monkeypatch.delenv("LRA_HUB_DIR", raising=False)


def lra(data, *words):
    command = [sys.executable, "-m", "lra.cli", *words, f"data_dir={data}"]
    return subprocess.run(command, env=os.environ, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_prepare_command_and_the_published_counts(mirror):
    done = lra(mirror, "data", "prepare", "text", "task.length=16384")
    assert done.returncode == 0, done.stderr
    info, splits = Text.load(Config(length=16_384), mirror)
    assert info.splits == {"train": 22_500, "validation": 2_500, "test": 25_000}
    assert {name: np.bincount(split.labels).tolist() for name, split in splits.items()} == {
        "train": [11_250, 11_250],
        "validation": [1_250, 1_250],
        "test": [12_500, 12_500],
    }
    assert (info.majority_baseline, info.vocab_size) == (0.5, 257)
    # lengths in bytes as counted outside of this project: over 4000, longest, mean, median
    lengths = {
        "train": np.concatenate([splits["train"].lengths, splits["validation"].lengths]),
        "test": splits["test"].lengths,
    }
    assert {name: (int((x > 4000).sum()), x.max(), round(x.mean()), np.median(x)) for name, x in lengths.items()} == {
        "train": (792, 13_704, 1325, 979),
        "test": (718, 12_988, 1294, 963),
    }
    assert not any("published" in warning or "test split" in warning for warning in info.warnings)
    manifest = json.loads((Text.folder(Config(length=16_384), mirror) / "manifest.json").read_text())
    assert manifest["details"]["exact"] == "the published 25,000 + 25,000 reviews"
    assert sorted(manifest["details"]["source_files"]) == [
        f"plain_text/{split}-00000-of-00001.parquet" for split in ("test", "train")
    ]


def test_characters_as_s4_counts_them(mirror):
    config = Config(fidelity="s4", length=4096)
    Text.prepare(config, mirror, lambda done, total: None)
    info, splits = Text.load(config, mirror)
    # S4 names 135 as the most ids there may be; 133 characters occur 15 times, two of them not in the first 4095
    assert info.vocab_size == 134
    assert splits["train"].lengths.max() == 4096
    facts = Text.verify(config, mirror)
    assert "22500 texts and labels compared" in facts[1]
    # 50,000 reviews: 96 repeat within train, 199 within test, 123 are in both
    assert facts[-1] == f"all splits: {96 + 199 + 123} rows repeat another"


def test_a_tree_gives_the_same_rows_as_the_parquet_files(mirror, tmp_path):
    names = pyarrow.parquet.read_table(REAL / "imdb-filenames.parquet").to_pylist()
    tables = {
        split: pyarrow.parquet.read_table(real() / f"plain_text/{split}-00000-of-00001.parquet")["text"].to_pylist()
        for split in ("train", "test")
    }
    for entry in names:
        path = tmp_path / f"aclImdb/{entry['split']}/{entry['class']}/{entry['id']}_{entry['rating']}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tables[entry["split"]][entry["row"]], encoding="utf-8", newline="")
    options = {"length": 1000}
    expected = Text.prepare(Config(**options), mirror, lambda done, total: None)
    found = Text.prepare(Config(**options, source=str(tmp_path / "aclImdb")), tmp_path, lambda done, total: None)
    for path in expected.glob("*.bin"):
        assert (found / path.name).read_bytes() == path.read_bytes()


def test_memory_stays_far_below_what_a_loaded_data_set_takes(mirror):
    Text.prepare(Config(length=128), mirror, lambda done, total: None)  # what is imported and cached is there now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Text.prepare(Config(length=8192), mirror, lambda done, total: None)
    # 64 MB of text; rows of 8192 padded ids would take 400 MB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024


def test_trains_on_a_few_rows(mirror, tmp_path):
    rows = ("task.length=256", "task.train_rows=256", "task.validation_rows=64", "task.test_rows=64")
    small = ("trainer=smoke", "model.width=16", "model.ffn_width=16", "tracking=disabled", f"runs_dir={tmp_path}")
    assert lra(mirror, "data", "prepare", "text", *rows).returncode == 0
    done = lra(mirror, "train", "task=text", *rows, *small)
    assert done.returncode == 0, done.stderr
    result = json.loads(next(tmp_path.glob("text-256-*/result.json")).read_text())
    assert result["status"] in ("ok", "stuck")
