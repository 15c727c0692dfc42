"""The published ids: sizes, no row in two splits, and the same files again from the seed."""

import base64
import hashlib
import json

import numpy as np
import pytest
import torch

from lra import make_splits
from lra.data import splits
from lra.errors import UserError
from lra.tasks import text_source
from tests.lra.reviews import real

SIZES = {
    "imdb": {"train": 22_500, "validation": 2_500},
    "cifar10": {"train": 45_000, "validation": 5_000},
    "pathfinder": {"train": 160_000, "validation": 20_000, "test": 20_000},
    "cifar10-s4": {"train": 45_000, "validation": 5_000},
    "pathfinder-s4": {"train": 160_000, "validation": 20_000, "test": 20_000},
}


@pytest.mark.parametrize("name", SIZES)
def test_every_id_is_in_one_split(name):
    ids = splits.load(name)
    assert {split: len(chosen) for split, chosen in ids.items()} == SIZES[name]
    everything = np.sort(np.concatenate(list(ids.values())))
    np.testing.assert_array_equal(everything, np.arange(sum(SIZES[name].values())))
    assert all((np.diff(chosen) > 0).all() for chosen in ids.values())


@pytest.mark.parametrize("name", ["cifar10", "pathfinder"])
def test_s4_files_come_out_the_same_byte_for_byte(name):
    assert make_splits.s4(name) == (splits.FOLDER / f"{name}-s4.json").read_text()


@pytest.mark.parametrize("name", ["cifar10", "pathfinder"])
def test_files_come_out_the_same_byte_for_byte(name):
    assert getattr(make_splits, name)() == (splits.FOLDER / f"{name}.json").read_text()


@pytest.mark.parametrize(("name", "rows"), [("cifar10", 50_000), ("pathfinder", 200_000), ("pathfinder", 415)])
def test_s4_splits_are_those_of_random_split(name, rows):
    # the calls of state-spaces/s4, on a data set that is nothing but the numbers of its rows
    if name == "cifar10":
        sizes = {"train": 45_000, "validation": 5_000}
    else:
        sizes = {"train": rows - 2 * int(0.1 * rows), "validation": int(0.1 * rows), "test": int(0.1 * rows)}
    generator = torch.Generator().manual_seed(42)
    parts = torch.utils.data.random_split(range(rows), list(sizes.values()), generator=generator)
    found = splits.s4_ids(name, rows)
    for split, part in zip(sizes, parts, strict=True):
        assert found[split].tolist() == sorted(part.indices)


def test_ids_are_those_that_the_file_describes():
    # read by nothing but what the file says of itself
    entry = json.loads((splits.FOLDER / "cifar10.json").read_text())
    mask = base64.b64decode(entry["masks"]["validation"])
    ids = [i for i in range(entry["rows"]) if mask[i // 8] >> (i % 8) & 1]
    keys = {i: hashlib.sha256(f"{entry['seed']}:cifar10:{i}".encode()).hexdigest() for i in range(entry["rows"])}
    assert ids == sorted(sorted(keys, key=keys.get)[: entry["rows"] // 10])
    assert entry["sha256"]["validation"] == hashlib.sha256("".join(f"{i}\n" for i in ids).encode()).hexdigest()
    assert ids == splits.load("cifar10")["validation"].tolist()


def test_an_altered_file_is_refused(tmp_path, monkeypatch):
    text = (splits.FOLDER / "cifar10.json").read_text()
    entry = json.loads(text)
    mask = entry["masks"]["validation"]
    (tmp_path / "cifar10.json").write_text(text.replace(mask, "/" + mask[1:]))
    monkeypatch.setattr(splits, "FOLDER", tmp_path)
    with pytest.raises(UserError, match="cifar10.json: the ids of validation do not have their sha256"):
        splits.load("cifar10")


def digests(texts):
    return [hashlib.sha256(text.encode()).digest() for text in texts]


def test_validation_texts_are_stratified_apart_and_free_of_order():
    # 300 rows of label 0 and 200 of label 1, among them texts that occur up to three times
    texts = [f"a{i // 3 if i < 60 else i}" for i in range(300)] + [f"b{i // 2 if i < 50 else i}" for i in range(200)]
    labels = np.array([0] * 300 + [1] * 200)
    ids = splits.text_validation(digests(texts), labels)
    order = splits.text_order(digests(texts), labels)
    rows = order[ids]
    assert np.bincount(labels[rows]).tolist() == [30, 20]
    assert not {texts[i] for i in rows} & {texts[i] for i in np.setdiff1d(np.arange(500), rows)}
    shuffled = np.random.default_rng(0).permutation(500)
    again = [texts[i] for i in shuffled]
    np.testing.assert_array_equal(splits.text_validation(digests(again), labels[shuffled]), ids)
    other = splits.text_order(digests(again), labels[shuffled])
    assert [again[i] for i in other[ids]] == [texts[i] for i in rows]


def test_fingerprint_sees_texts_and_labels_but_not_their_order():
    a = splits.fingerprint(digests("xyz"), np.array([0, 1, 1]))
    assert a == splits.fingerprint(digests("zxy"), np.array([1, 0, 1]))
    assert a != splits.fingerprint(digests("xyz"), np.array([1, 0, 1]))
    assert a != splits.fingerprint(digests("xyq"), np.array([0, 1, 1]))


@pytest.mark.slow
def test_imdb_file_comes_out_the_same_from_the_reviews(tmp_path):
    reviews = {split: text_source.read(str(real()), tmp_path, split) for split in text_source.SPLITS}
    rows = {split: (found.digests, found.labels) for split, found in reviews.items()}
    assert make_splits.imdb(rows) == (splits.FOLDER / "imdb.json").read_text()
    found, ids = reviews["train"], splits.load("imdb")
    order = splits.text_order(found.digests, found.labels)
    chosen = {split: order[ids[split]] for split in ids}
    assert np.bincount(found.labels[chosen["validation"]]).tolist() == [1250, 1250]
    # the 96 texts that train has twice are not on both sides
    texts = {split: {found.texts[i] for i in rows} for split, rows in chosen.items()}
    assert len(texts["train"] | texts["validation"]) == 25_000 - 96
    assert not texts["train"] & texts["validation"]
