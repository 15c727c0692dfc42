"""Arrays on disk: what is written is read back, and nothing else is accepted."""

import errno
import hashlib
import json
import os
import threading
import time

import numpy as np
import pytest

from lra.data import arrays
from lra.data.arrays import SPLITS, Identity, Layout, Writer, read
from lra.errors import UserError

IDENTITY = Identity("toy", "1", {"length": 8, "seed": 0}, "lra data prepare toy")


def random_rows(seed, rows=20):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rows)
    return rng.integers(1, 16, lengths.sum()), lengths, rng.integers(0, 10, rows)


def write(folder, identity=IDENTITY, token_dtype="|u1"):
    with Writer(folder, identity, Layout(token_dtype=token_dtype)) as writer:
        for i, split in enumerate(SPLITS):
            writer.append(split, *random_rows(i))
            writer.append(split, *random_rows(i + 10))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "toy")


def test_rows_come_back_padded_to_the_longest_of_the_batch(folder):
    _, splits = read(folder, IDENTITY)
    for i, name in enumerate(SPLITS):
        split = splits[name]
        blocks = [random_rows(i), random_rows(i + 10)]
        expected = [row for tokens, lengths, _ in blocks for row in np.split(tokens, np.cumsum(lengths)[:-1])]
        assert len(split) == 40
        assert split.labels.tolist() == [label for _, _, labels in blocks for label in labels]
        assert split.lengths.tolist() == [len(row) for row in expected]
        assert split.lengths.dtype == np.int64
        indices = np.array([7, 39, 0, 7])
        tokens, lengths = split.rows(indices)
        assert tokens.shape == (4, max(len(expected[j]) for j in indices))
        assert tokens.dtype == np.int64
        for row, length, j in zip(tokens, lengths, indices):
            assert row[:length].tolist() == expected[j].tolist() == split.row(j).tolist()
            assert not row[length:].any()
        assert split.flat(3, 6).tolist() == np.concatenate(expected[3:6]).tolist()


def test_no_indices_give_an_empty_batch(folder):
    tokens, lengths = read(folder, IDENTITY)[1]["train"].rows(np.array([], np.int64))
    assert tokens.shape == (0, 0)
    assert lengths.shape == (0,)


def test_tokens_stay_on_disk(folder):
    assert isinstance(read(folder, IDENTITY)[1]["train"].tokens, np.memmap)


def test_manifest_counts(folder):
    split = read(folder, IDENTITY)[0]["splits"]["train"]
    assert split["rows"] == 40
    assert sum(split["labels"].values()) == 40
    assert split["lengths"]["min"] >= 1
    assert split["lengths"]["max"] <= 8
    assert split["files"]["tokens"]["bytes"] == split["tokens"]


def test_wide_token_ids(tmp_path):
    with Writer(tmp_path / "wide", IDENTITY, Layout(token_dtype="<u2")) as writer:
        for split in SPLITS:
            writer.append(split, np.array([1, 300, 65_535]), np.array([1, 2]), np.array([0, 1]))
    assert read(tmp_path / "wide", IDENTITY, Layout(token_dtype="<u2"))[1]["test"].row(1).tolist() == [300, 65_535]


@pytest.mark.parametrize("tokens", [[1, 256, 3], [1, -1, 3]])
def test_token_ids_that_do_not_fit_are_refused(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"do not fit 0\.\.255"), Writer(tmp_path / "x", IDENTITY) as writer:
        writer.append("train", np.array(tokens), np.array([3]), np.array([0]))
    assert not list(tmp_path.iterdir())


def test_lengths_that_do_not_match_are_refused(tmp_path):
    with pytest.raises(ValueError, match="do not match"), Writer(tmp_path / "x", IDENTITY) as writer:
        writer.append("train", np.array([1, 2, 3]), np.array([2]), np.array([0]))


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (manifest | changes).items() if v is not None}))


def flip_a_byte(folder):
    path = folder / "validation.tokens.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def truncate(folder):
    path = folder / "train.labels.bin"
    path.write_bytes(path.read_bytes()[:-8])


BROKEN = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: expected a manifest, found No"),
    "not json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: expected JSON, found text"),
    "not text": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json: expected JSON"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "expected the keys format, task"),
    "newer format": (lambda f: edit_manifest(f, format=99), "expected format 2, found format 99"),
    "no splits": (lambda f: edit_manifest(f, splits=None), "found none of splits"),
    "a split less": (lambda f: edit_manifest(f, splits={}), "expected rows and files of train, val"),
    "other task": (lambda f: edit_manifest(f, task="text"), "expected task toy, found text"),
    "other task version": (lambda f: edit_manifest(f, version="0"), "expected version 1, found 0"),
    "other parameters": (lambda f: edit_manifest(f, parameters={"length": 9}), r"parameters .*8.*found .*9"),
    "file gone": (lambda f: (f / "test.tokens.bin").unlink(), r"test.tokens.bin: expected a file.*found No"),
    "file truncated": (truncate, "train.labels.bin: expected 320 bytes, found 312"),
    "byte flipped": (flip_a_byte, "validation.tokens.bin: expected sha256"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_with_the_way_out(folder, name):
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        read(folder, IDENTITY)
    assert f"delete or move {folder}, then run `lra data prepare toy`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("labels", np.zeros(39, "<i8"), "expected 40 offsets for the labels, found 41"),
        ("offsets", np.arange(41, dtype="<i8"), "expected offsets rising from 0"),
        ("offsets", np.zeros(41, "<i8"), "expected offsets rising from 0"),
    ],
)
def test_files_that_contradict_each_other_are_refused(folder, part, array, message):
    data = array.tobytes()
    (folder / f"train.{part}.bin").write_bytes(data)
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    sha256 = hashlib.sha256(data).hexdigest()
    splits["train"]["files"][part] |= {"bytes": len(data), "sha256": sha256}
    edit_manifest(folder, splits=splits)
    with pytest.raises(UserError, match=message):
        read(folder, IDENTITY)


def test_a_missing_folder_says_how_to_build_it(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist.*run `lra data prepare toy`"):
        read(tmp_path / "nowhere", IDENTITY)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_writer_leaves_nothing(tmp_path, error):
    def interrupted():
        with Writer(tmp_path / "toy", IDENTITY) as writer:
            writer.append("train", *random_rows(0))
            assert (tmp_path / ".toy.partial").is_dir()
            raise error

    with pytest.raises(error):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    killed = Writer(tmp_path / "toy", IDENTITY)
    killed.__enter__()
    killed.append("train", *random_rows(5))
    for file in killed._splits["train"].files.values():
        file.close()
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "toy", IDENTITY)
    write(tmp_path / "toy")
    assert len(read(tmp_path / "toy", IDENTITY)[1]["train"]) == 40
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_full_disk_is_reported_and_cleaned_up(tmp_path):
    class FullDisk:
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self):
            pass

    def fill():
        with Writer(tmp_path / "toy", IDENTITY) as writer:
            writer.append("train", *random_rows(0))
            writer._splits["train"].files.pop("tokens").close()
            writer._splits["train"].files["tokens"] = FullDisk()
            writer.append("train", *random_rows(1))

    with pytest.raises(UserError, match=r"cannot write .*toy: No space left on device; free space"):
        fill()
    assert not list(tmp_path.iterdir())


def test_a_partial_write_is_continued(tmp_path):
    class Slow:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(data[:3])

        def __getattr__(self, name):
            return getattr(self.file, name)

    with Writer(tmp_path / "toy", IDENTITY) as writer:
        for split in SPLITS:
            writer.append(split, *random_rows(0))
            files = writer._splits[split].files
            files["tokens"] = Slow(files["tokens"])
            writer.append(split, *random_rows(1))
    assert len(read(tmp_path / "toy", IDENTITY)[1]["train"]) == 40


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_is_reported(tmp_path, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(arrays.Path, "mkdir", refuse)
    with pytest.raises(UserError, match=rf"cannot write .*partial: {os.strerror(number)}.*another data folder"):
        write(tmp_path / "toy")
    with pytest.raises(UserError, match=r"cannot write .*\.toy\.lock"), arrays.exclusive(tmp_path / "toy"):
        pass


def test_a_file_in_place_of_the_data_folder_is_reported(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(UserError, match="cannot write"), arrays.exclusive(tmp_path / "data" / "toy"):
        pass


def test_exclusive_lets_one_in_at_a_time(tmp_path):
    inside, most = [], []

    def enter():
        for _ in range(10):
            with arrays.exclusive(tmp_path / "toy"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.002)
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 50
    # the lock goes with the last of them, and with one that fails
    with pytest.raises(ValueError, match="x"), arrays.exclusive(tmp_path / "toy"):
        raise ValueError("x")
    assert not list(tmp_path.iterdir())


def test_row_hashes_depend_on_the_row_only():
    first, second, third = arrays.row_hashes(np.array([1, 2, 1, 2, 3], np.uint8), np.array([2, 2, 1]))
    assert first == second != third


def test_pairs_of_documents_and_several_labels_a_row(tmp_path):
    layout = Layout(documents=2, outputs=3)
    with Writer(tmp_path / "pairs", IDENTITY, layout) as writer:
        for split in SPLITS:
            # row 0: documents [1, 2] and [3]; row 1: [4] and [5, 6, 7]
            tokens, lengths = np.arange(1, 8), np.array([2, 1, 1, 3])
            writer.append(split, tokens, lengths, np.array([[0, 1, 2], [3, 4, 5]]))
    manifest, splits = read(tmp_path / "pairs", IDENTITY, layout)
    split = splits["train"]
    assert (len(split), split.lengths.tolist()) == (2, [2, 3])
    assert split.row(1).tolist() == [4, 5, 6, 7]
    assert split.labels.tolist() == [[0, 1, 2], [3, 4, 5]]
    tokens, lengths = split.rows(np.array([1, 0]))
    assert tokens.tolist() == [[4, 0, 0], [5, 6, 7], [1, 2, 0], [3, 0, 0]]
    assert lengths.tolist() == [1, 3, 2, 1]
    assert manifest["splits"]["train"]["rows"] == 2
    assert manifest["splits"]["train"]["labels"] == {str(label): 1 for label in range(6)}
    with pytest.raises(UserError, match="expected layout"):
        read(tmp_path / "pairs", IDENTITY)


@pytest.mark.parametrize(
    ("lengths", "labels"), [([2, 1, 4], [[0, 1]]), ([3, 4], [[0]]), ([3, 4], [0]), ([3, 3], [[0, 1]])]
)
def test_rows_that_do_not_fit_the_layout_are_refused(tmp_path, lengths, labels):
    layout = Layout(documents=2, outputs=2)
    with pytest.raises(ValueError, match="do not match"), Writer(tmp_path / "x", IDENTITY, layout) as writer:
        writer.append("train", np.arange(1, 8), np.array(lengths), np.array(labels))
