"""Text: tokens checked by hand, one row for every copy of the reviews, and rows refused that are not right."""

import errno
import hashlib
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lra.config import compose_run
from lra.errors import UserError
from lra.tasks.text import Config, Text, frequent_characters
from lra.tasks.text_tokens import Bytes, Characters
from tests.lra.reviews import some, write_hub, write_tree

COPY = {"train": some(200), "test": some(60, start=1000)}


def ignore(done, total):
    """Progress that nobody watches."""


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch, tmp_path):
    monkeypatch.delenv("LRA_HUB_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(tmp_path):
    return write_hub(tmp_path / "copy", COPY)


def prepare(data, source, **options):
    config = Config(source=str(source), **options)
    folder = Text.prepare(config, data, ignore)
    return config, folder, *Text.load(config, data)


def texts_of(split):
    return [Bytes(99).decode(split.row(i)).decode() for i in range(len(split))]


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.bin"))}


@pytest.mark.parametrize(
    ("text", "length", "ids"),
    [
        ("Ab.", 9, [66, 99, 47]),
        ("abcd", 3, [98, 99, 100]),
        ("\0", 9, [1]),
        ("é", 9, [0xC3 + 1, 0xA9 + 1]),
        ("日本", 4, [0xE6 + 1, 0x97 + 1, 0xA5 + 1, 0xE6 + 1]),
        ("😀", 9, [0xF0 + 1, 0x9F + 1, 0x98 + 1, 0x80 + 1]),
    ],
)
def test_bytes_by_hand(text, length, ids):
    found, lengths = Bytes(length).encode([text.encode(), b"z"])
    assert found.tolist() == [*ids, 123]
    assert lengths.tolist() == [len(ids), 1]
    assert Bytes(length).decode(found[: len(ids)]) == text.encode()[:length]


def test_every_byte_has_its_own_id_and_none_is_padding():
    ids, _ = Bytes(256).encode([bytes(range(256))])
    assert ids.tolist() == list(range(1, 257))


def test_characters_by_hand():
    # b 20 times, a 16, é and 😀 15 each, z and ü too rare; with equal counts the lower code point comes first
    texts = ["b" * 20 + "a" * 16 + "😀" * 15, "é" * 15 + "z" * 14, "ü"]
    assert frequent_characters([text.encode() for text in texts], 101) == "baé😀"
    characters = Characters(5, "baé😀")
    assert characters.vocab_size == 7
    ids, lengths = characters.encode(["aé😀b".encode(), "züb".encode(), b"aaaaaaa"])
    assert ids.tolist() == [4, 5, 6, 3, 2] + [1, 1, 3, 2] + [4, 4, 4, 4, 2]
    assert lengths.tolist() == [5, 4, 5]
    assert characters.decode(ids[:5]) == "aé😀b".encode()
    # only what is kept of a text counts
    assert frequent_characters([text.encode() for text in texts], 37) == "baé"


def test_prepares_every_row_with_its_label(tmp_path, hub):
    config, _, info, splits = prepare(tmp_path, hub, length=32)
    assert info.splits == {"train": 180, "validation": 20, "test": 60}
    assert (info.vocab_size, info.num_classes, info.majority_baseline, info.documents) == (257, 2, 0.5, 1)
    labels = {split: dict(zip((text[:32] for text in texts), labels)) for split, (texts, labels) in COPY.items()}
    rows = {name: dict(zip(texts_of(split), split.labels.tolist())) for name, split in splits.items()}
    assert rows["test"] == labels["test"]
    assert rows["train"] | rows["validation"] == labels["train"]
    assert not set(rows["train"]) & set(rows["validation"])
    assert [sum(rows["validation"].values()), len(rows["validation"])] == [10, 20]
    assert any("not the published ones" in warning for warning in info.warnings)
    facts = Text.verify(config, tmp_path)
    assert "180 texts and labels compared" in facts[1]


def test_the_same_arrays_come_from_every_copy(tmp_path, hub):
    order = np.random.default_rng(0).permutation(200)
    texts, labels = COPY["train"]
    shuffled = {"train": ([texts[i] for i in order], [labels[i] for i in order]), "test": COPY["test"]}
    expected = digest(prepare(tmp_path, hub)[1])
    for i, source in enumerate(
        (write_hub(tmp_path / "shuffled", shuffled), write_tree(tmp_path / "tree", COPY), tmp_path / "tree")
    ):
        assert digest(prepare(tmp_path / str(i), source)[1]) == expected


def test_length_cuts_and_is_told_where_it_measures_little(tmp_path, hub):
    *_, short, splits = prepare(tmp_path, hub, length=8)
    assert splits["train"].lengths.max() == 8
    assert not any("shorter than" in warning for warning in short.warnings)
    *_, info, splits = prepare(tmp_path, hub, length=16_384)
    assert splits["train"].lengths.max() == max(len(text) for text in COPY["train"][0])
    assert "100 % of the training sequences are shorter than 16384 tokens" in info.warnings[0]


def test_rows_are_a_choice_that_nothing_else_changes(tmp_path, hub):
    *_, info, few = prepare(tmp_path, hub, train_rows=30, validation_rows=5, test_rows=10)
    assert info.splits == {"train": 30, "validation": 5, "test": 10}
    *_, more = prepare(tmp_path, hub, train_rows=90, length=16, fidelity="s4", test_rows=10)
    *_, all_rows = prepare(tmp_path, hub)
    assert set(texts_of(few["train"])) < set(texts_of(all_rows["train"]))
    np.testing.assert_array_equal(few["test"].labels, more["test"].labels)
    with pytest.raises(UserError, match="task.validation_rows=21: the source has 20 rows"):
        prepare(tmp_path, hub, validation_rows=21)


def test_validation_on_test_as_lra_selects_is_marked(tmp_path, hub):
    *_, info, splits = prepare(tmp_path, hub, validation="test")
    assert info.splits == {"train": 200, "validation": 60, "test": 60}
    assert texts_of(splits["validation"]) == texts_of(splits["test"])
    assert any("validation is the test split" in warning for warning in info.warnings)
    assert not any("validation is" in warning for warning in prepare(tmp_path, hub)[2].warnings)


def test_characters_end_with_their_mark(tmp_path):
    texts, labels = COPY["train"]
    hub = write_hub(tmp_path / "copy", COPY | {"train": ([*texts, "ß]^-\\\n"] + ["ab]^-\\\n"] * 15, labels + [0] * 16)})
    config, folder, info, splits = prepare(tmp_path, hub, fidelity="s4", length=16)
    assert splits["train"].lengths.max() == 16
    assert {int(splits["test"].row(i)[-1]) for i in range(60)} == {2}
    known = json.loads((folder / "manifest.json").read_text())["details"]["characters"]
    assert info.vocab_size == len(known) + 3
    rows = [*texts, "ß]^-\\\n"] + ["ab]^-\\\n"] * 15
    counts = Counter(character for text in rows for character in text[:15])
    assert known == "".join(sorted((c for c in counts if counts[c] >= 15), key=lambda c: (-counts[c], c)))
    assert set(counts) - set(known) == {"ß"}
    assert "195 texts and labels compared" in Text.verify(config, tmp_path)[1]


def rewrite(folder, split, part, data):
    """Replace a file and make the manifest agree, as somebody does who edits both."""
    (folder / f"{split}.{part}.bin").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"][split]["files"][part]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("fidelity", ["lra", "s4"])
def test_verify_finds_one_wrong_label_and_one_wrong_byte(tmp_path, hub, fidelity):
    config, folder, _, splits = prepare(tmp_path, hub, fidelity=fidelity)
    labels, tokens = np.array(splits["test"].labels), np.array(splits["test"].tokens)
    swapped = labels.copy()
    swapped[[0, np.flatnonzero(labels != labels[0])[0]]] = 1 - labels[0], labels[0]
    rewrite(folder, "test", "labels", swapped.tobytes())
    with pytest.raises(UserError, match="expected test to hold the reviews of"):
        Text.verify(config, tmp_path)
    rewrite(folder, "test", "labels", labels.tobytes())
    Text.verify(config, tmp_path)
    tokens[3] = 5
    rewrite(folder, "test", "tokens", tokens.tobytes())
    with pytest.raises(UserError, match="expected test to hold the reviews of"):
        Text.verify(config, tmp_path)
    tokens[3] = 0
    rewrite(folder, "test", "tokens", tokens.tobytes())
    with pytest.raises(UserError, match="expected row 0 of test to be ids of a text"):
        Text.verify(config, tmp_path)


def test_verify_without_the_source_says_what_it_could_not_compare(tmp_path, hub):
    config, *_ = prepare(tmp_path, hub)
    hub.rename(tmp_path / "gone")
    assert "labels not compared" in Text.verify(config, tmp_path)[1]
    assert Text.prepare(config, tmp_path, ignore).is_dir()


def test_a_source_that_changed_is_noticed(tmp_path, hub):
    config, *_ = prepare(tmp_path, hub)
    write_hub(hub, {"test": some(61, start=1000)})
    with pytest.raises(UserError, match="test-00000-of-00001.parquet: expected sha256"):
        Text.prepare(config, tmp_path, ignore)
    with pytest.raises(UserError, match="expected the reviews in .* to be those that were read"):
        Text.verify(config, tmp_path)


def test_the_mirror_must_have_all_rows_but_a_named_copy_need_not(tmp_path):
    write_hub(tmp_path / "hub/stanfordnlp/imdb", COPY)
    with pytest.raises(UserError, match=r"expected 25000 rows in train as the Hub has, found 200; .* task.source="):
        Text.prepare(Config(), tmp_path, ignore)
    assert not list(tmp_path.glob("text/length*"))


@pytest.mark.parametrize(
    ("texts", "labels", "message"),
    [
        (["a", "", "c"], [0, 1, 0], "row 1 of train: expected a text, found an empty one"),
        (["a", "b", "c"], [0, 1, -1], "row 2 of train: expected label 0 or 1, found -1"),
        (["a", "b", "c"], [0, 1, 0], "expected rows for validation, found too few"),
    ],
)
def test_rows_that_are_not_right_are_named(tmp_path, texts, labels, message):
    hub = write_hub(tmp_path / "copy", {"train": (texts, labels), "test": COPY["test"]})
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, hub)
    assert not list(tmp_path.glob("text/*length*"))


def test_a_tree_with_a_damaged_file_or_without_files(tmp_path):
    tree = write_tree(tmp_path, COPY)
    (tree / "train/neg/._0_3.txt").write_bytes(b"\0\0left by another system")
    assert prepare(tmp_path, tree)[2].splits["train"] == 180
    (tree / "train/neg/0_3.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UserError, match="0_3.txt: expected UTF-8, found byte 0xef at 2"):
        prepare(tmp_path / "again", tree)
    for path in (tree / "test/pos").iterdir():
        path.unlink()
    (tree / "train/neg/0_3.txt").write_bytes(b"fine")
    with pytest.raises(UserError, match=r"test/pos: expected reviews in files \*.txt, found none"):
        prepare(tmp_path / "again", tree)


def test_a_tree_without_a_class_or_with_what_is_no_file(tmp_path):
    tree = write_tree(tmp_path, COPY)
    os.mkfifo(tree / "train/pos/1_8.pipe.txt")
    with pytest.raises(UserError, match=r"1_8.pipe.txt: expected a file, found something else"):
        prepare(tmp_path / "again", tree)
    shutil.rmtree(tree / "train/neg")
    for named in (tree, tree.parent):
        with pytest.raises(UserError, match=r"aclImdb/train/neg: expected reviews in files \*.txt, found none"):
            prepare(tmp_path / "again", named)


def test_a_class_folder_that_may_not_be_read_is_not_taken_for_empty(tmp_path, monkeypatch):
    tree, listdir = write_tree(tmp_path, COPY), os.listdir

    def refuse(path):
        if Path(path).name == "pos":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)  # permissions do not bind root
    with pytest.raises(UserError, match="train/pos: cannot read it .Permission denied.; fix its permissions"):
        prepare(tmp_path / "again", tree)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": "tset"}, "task.validation='tset': text takes train | test"),
        ({"length": 1}, r"task.length=1: text takes 2..65536"),
        ({"fidelity": "bytes"}, r"task.fidelity='bytes'"),
        ({"source": "generated"}, r"task.source=generated: text takes auto | hub or a folder"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(UserError, match=message):
        Text.check(Config(**options))


def test_the_configuration_files_give_the_defaults():
    assert compose_run(["task=text"]).task == Config(source="hub")
    assert compose_run(["task=text", "regime=extreme"]).task.length == 16_384
