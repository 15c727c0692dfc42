"""Prepared ListOps rows: built once, proven, found again, and refused when they are not those asked for."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from lra.errors import UserError
from lra.tasks import load
from lra.tasks.listops import Config, ListOps, decode
from tests.lra.listops_reference import value_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"length": 64, "train_rows": 300, "validation_rows": 40, "test_rows": 50}


def ignore(done, total):
    """Progress that nobody watches."""


@pytest.fixture
def prepared(tmp_path):
    config = Config(**SMALL)
    return config, tmp_path, ListOps.prepare(config, tmp_path, ignore)


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_same_seed_same_bytes(prepared, tmp_path_factory):
    config, _, folder = prepared
    again = ListOps.prepare(config, tmp_path_factory.mktemp("again"), ignore)
    other = ListOps.prepare(Config(**SMALL, seed=1), tmp_path_factory.mktemp("other"), ignore)
    assert digest(folder) == digest(again)
    assert digest(folder)["test.tokens.bin"] != digest(other)["test.tokens.bin"]


def test_rows_are_the_same_on_every_machine_and_numpy(prepared):
    # a change means other data under the same version: raise VERSION, do not only update this
    assert digest(prepared[2])["train.tokens.bin"].startswith("f57b0afce2e30b04")


def test_evaluation_rows_do_not_depend_on_the_number_of_training_rows(prepared):
    config, data, folder = prepared
    more = ListOps.prepare(Config(**SMALL | {"train_rows": 400}), data, ignore)
    assert digest(folder)["test.tokens.bin"] == digest(more)["test.tokens.bin"]
    assert (more / "train.tokens.bin").read_bytes().startswith((folder / "train.tokens.bin").read_bytes())


def test_load(prepared):
    config, data, _ = prepared
    info, splits = ListOps.load(config, data)
    assert (info.name, info.version, info.vocab_size, info.num_classes, info.length) == (
        "listops",
        "1",
        16,
        10,
        64,
    )
    assert info.splits == {"train": 300, "validation": 40, "test": 50}
    assert info.majority_baseline == np.bincount(splits["test"].labels).max() / 50
    tokens, lengths = splits["train"].rows(np.arange(300))
    assert tokens.shape == (300, lengths.max())
    assert [value_of(decode(row)) for row in tokens] == splits["train"].labels.tolist()


def test_no_row_occurs_twice(tmp_path):
    # so short that most sampled rows repeat another
    config = Config(length=16, train_rows=8000, validation_rows=500, test_rows=500, max_args=4)
    ListOps.prepare(config, tmp_path, ignore)
    splits = ListOps.load(config, tmp_path)[1].values()
    rows = [bytes(split.row(i).astype(np.uint8)) for split in splits for i in range(len(split))]
    assert len(set(rows)) == len(rows) == 9000


def test_too_few_distinct_rows_are_reported(tmp_path):
    # [OP d d d ] is all there is: 4 * 10 ** 3
    config = Config(length=16, max_depth=2, max_args=3)
    with pytest.raises(UserError, match=r"task.length=16, .*expected 100000 distinct rows, .* than 4000; ask"):
        ListOps.prepare(config, tmp_path, ignore)
    assert not list((tmp_path / "listops").glob("length*"))


def test_progress_counts_rows(tmp_path):
    calls = []
    ListOps.prepare(Config(**SMALL), tmp_path, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (390, 390)


def test_a_valid_copy_is_kept_and_an_altered_one_refused(prepared):
    config, data, folder = prepared
    before = folder.stat().st_mtime_ns, folder.stat().st_ino
    ListOps.prepare(config, data, ignore)
    assert (folder.stat().st_mtime_ns, folder.stat().st_ino) == before
    (folder / "test.labels.bin").write_bytes(bytes(400))
    for use in (lambda: ListOps.prepare(config, data, ignore), lambda: ListOps.load(config, data)):
        with pytest.raises(UserError, match=r"test.labels.bin: expected sha256.*run `lra data prepare listops task"):
            use()


def test_missing_data_says_the_command(tmp_path):
    with pytest.raises(UserError, match=r"run `lra data prepare listops task.length=256 task.seed=3 data_dir="):
        ListOps.load(Config(length=256, seed=3), tmp_path)


def test_verify_proves_counts_labels_and_uniqueness(prepared):
    config, data, _ = prepared
    facts = ListOps.verify(config, data)
    assert "train: 300 rows of" in facts[1]
    assert "300 labels recomputed" in facts[1]
    assert facts[-1] == "all splits: 0 rows repeat another"


def rewrite(folder, split, part, data):
    """Replace a file and make the manifest agree, as somebody does who edits both."""
    (folder / f"{split}.{part}.bin").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["splits"][split]["files"][part]
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_verify_finds_wrong_labels_and_wrong_counts(prepared):
    config, data, folder = prepared
    labels = np.fromfile(folder / "test.labels.bin", "<i8")
    swapped = labels.copy()
    i, j = 0, np.flatnonzero(labels != labels[0])[0]
    swapped[[i, j]] = labels[[j, i]]
    rewrite(folder, "test", "labels", swapped.tobytes())
    with pytest.raises(UserError, match=rf"expected row 0 of test to have value {labels[j]}, found {labels[i]}"):
        ListOps.verify(config, data)
    rewrite(folder, "test", "labels", np.zeros_like(labels).tobytes())
    with pytest.raises(UserError, match="expected labels of test to be"):
        ListOps.verify(config, data)


def test_verify_finds_repeated_rows(prepared):
    config, data, folder = prepared
    manifest = json.loads((folder / "manifest.json").read_text())
    for part in ("tokens", "offsets", "labels"):
        (folder / f"validation.{part}.bin").write_bytes((folder / f"test.{part}.bin").read_bytes())
    manifest["splits"]["validation"] = manifest["splits"]["test"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="expected no row twice, found 50 repeated rows"):
        ListOps.verify(config, data)


PREPARE = """
import sys, pathlib
from lra.tasks.listops import Config, ListOps
config = Config(length=1024, train_rows=int(sys.argv[2]), validation_rows=200, test_rows=200)
folder = ListOps.prepare(config, pathlib.Path(sys.argv[1]), lambda done, total: print(done, flush=True))
print(folder, flush=True)
"""


def start(data, rows):
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(data), str(rows)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_prepare_is_repeated(tmp_path, number):
    with start(tmp_path, 10_000) as process:
        assert process.stdout.readline()
        process.send_signal(number)
    left = [path.name for path in (tmp_path / "listops").iterdir()]
    assert not [name for name in left if not name.startswith(".")]
    assert any(name.endswith(".partial") for name in left) == (number == signal.SIGKILL)
    config = Config(length=1024, train_rows=10_000, validation_rows=200, test_rows=200)
    with pytest.raises(UserError, match="does not exist"):
        ListOps.load(config, tmp_path)
    ListOps.prepare(config, tmp_path, ignore)
    assert ListOps.load(config, tmp_path)[0].splits["train"] == 10_000
    assert not list((tmp_path / "listops").glob(".*.partial"))


def test_two_processes_at_once_share_one_copy(tmp_path):
    first, second = start(tmp_path, 3000), start(tmp_path, 3000)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    folders = {stdout.splitlines()[-1] for stdout, _ in outputs}
    assert len(folders) == 1
    # one built it and reported progress, the other waited and took the copy
    assert sorted(len(stdout.splitlines()) > 1 for stdout, _ in outputs) in ([False, True],)
    ListOps.verify(Config(length=1024, train_rows=3000, validation_rows=200, test_rows=200), tmp_path)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path):
    code = PREPARE + "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    peaks = []
    for rows in (2000, 20_000):
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(rows)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(result.stdout.splitlines()[-1]))
    # 18,000 rows more are 9 MB of tokens; their hashes and lengths, which are kept, about 3 MB
    assert peaks[1] - peaks[0] < 6000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 15}, r"task.length=15: listops takes 16..32768"),
        ({"length": 65_536}, r"task.length=65536: listops takes 16..32768"),
        ({"seed": -1}, r"task.seed=-1"),
        ({"train_rows": 0}, r"task.train_rows=0: listops takes 1.."),
        ({"max_depth": 1}, r"task.max_depth=1: listops takes 2..100"),
        ({"max_args": 11}, r"task.max_args=11: listops takes 2..10"),
        ({"source": "x", "seed": 1}, r"task.seed is for generated rows; remove it, or remove task.source"),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, message):
    for use in (ListOps.load, ListOps.verify, lambda c, d: ListOps.prepare(c, d, ignore)):
        with pytest.raises(UserError, match=message):
            use(Config(**options), tmp_path)


def test_folders_are_readable_and_differ(tmp_path):
    def name(**options):
        return ListOps.folder(Config(**options), tmp_path).name

    assert ListOps.folder(Config(), tmp_path) == tmp_path / "listops" / "length2000-generated-v1"
    assert name(max_depth=10) == name()
    assert name(length=256, seed=4, train_rows=10) == "length256-generated-seed4-trainrows10-v1"
    assert name(max_depth=8, max_args=5) == "length2000-generated-maxdepth8-maxargs5-v1"
    assert name(source="a") != name(source="b")


def test_yaml_and_registry_name_this_task():
    text = OmegaConf.load(ROOT / "conf" / "task" / "listops.yaml")
    assert text.pop("defaults") == ["listops_schema", "_self_"]
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), text)) == Config()
    assert load("listops") is ListOps
