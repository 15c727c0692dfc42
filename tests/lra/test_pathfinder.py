"""Pathfinder and Path-X as tasks: generated rows proven, release rows equal to their files, faults named."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lra.errors import UserError
from lra.tasks import load
from lra.tasks.pathfinder import FIRST, Config, Pathfinder, PathX, PathXConfig
from lra.tasks.pathfinder_generator import available, generate, parameters
from lra.tasks.pathfinder_release import KNOWN_BAD, split_ids
from lra.tasks.pathfinder_shards import Shards

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "pathfinder" / "upstream_generator_sample"
needs_cpp = pytest.mark.skipif(available()["cpp"] is not None, reason="no C++ kernel of the generator")
SMALL = {"train_rows": 60, "validation_rows": 10, "test_rows": 12}


def ignore(done, total):
    """Progress that nobody watches."""


@pytest.mark.parametrize("side", [16, 32, 64])
def test_generated_images_are_proven(tmp_path, side):
    config = Config(length=side * side, **SMALL)
    Pathfinder.prepare(config, tmp_path, ignore)
    info, splits = Pathfinder.load(config, tmp_path)
    assert info.splits == {"train": 60, "validation": 10, "test": 12}
    assert (info.vocab_size, info.num_classes, info.length, info.pixels) == (256, 2, side * side, None)
    tokens, lengths = splits["train"].rows(np.arange(60))
    assert tokens.shape == (60, side * side)
    assert set(lengths) == {side * side}
    # black is a pixel like any other, not padding; most of an image is black
    assert (tokens == 0).mean() > 0.3
    facts = Pathfinder.verify(config, tmp_path)
    assert "60 labels proven from the contours" in "\n".join(facts)
    assert not list((tmp_path / "pathfinder").glob(".*.shards"))


def test_evaluation_images_do_not_depend_on_the_training_rows(tmp_path):
    folders = [Pathfinder.prepare(Config(**SMALL | {"train_rows": n}), tmp_path, ignore) for n in (20, 30)]
    for name in ("test", "validation"):
        first, second = ((folder / f"{name}.tokens.bin").read_bytes() for folder in folders)
        assert first == second
    assert (folders[1] / "train.tokens.bin").read_bytes().startswith((folders[0] / "train.tokens.bin").read_bytes())


@needs_cpp
def test_no_small_image_occurs_twice(tmp_path):
    """At 16 pixels the generator makes the same image again now and then, of either label."""
    rows = {"train_rows": 4000, "validation_rows": 500, "test_rows": 500}
    config = Config(length=256, **rows)
    folder = Pathfinder.prepare(config, tmp_path, ignore)
    _, splits = Pathfinder.load(config, tmp_path)
    images = [splits[name].row(i).tobytes() for name in splits for i in range(len(splits[name]))]
    assert len(images) == len(set(images)) == 5000
    # what was left out are images of the generator that rows before them have
    left_out = json.loads((folder / "manifest.json").read_text())["details"]["left_out"]
    assert sum(map(len, left_out.values())) > 5
    for name, numbers in left_out.items():
        for number in numbers:
            pixels = generate(parameters(16), 0, FIRST[name] + number, 1).images[0]
            assert pixels.astype(np.int64).tobytes() in images
    assert "4000 labels proven from the contours" in "\n".join(Pathfinder.verify(config, tmp_path))
    more = Pathfinder.prepare(Config(length=256, **rows | {"train_rows": 4500}), tmp_path, ignore)
    for name in ("test", "validation", "train"):
        assert (more / f"{name}.tokens.bin").read_bytes().startswith((folder / f"{name}.tokens.bin").read_bytes())


def test_too_few_different_images_are_reported(tmp_path, monkeypatch):
    one = generate(parameters(16), 0, 0, 1)
    monkeypatch.setattr(
        "lra.tasks.pathfinder_shards.generate",
        lambda parameters, seed, start, count: type(one)(*(np.repeat(array, count, axis=0) for array in one)),
    )
    with pytest.raises(UserError, match="task.test_rows=12: expected 82 different images, found no more than 1"):
        Pathfinder.prepare(Config(length=256, **SMALL), tmp_path, ignore)
    assert not list((tmp_path / "pathfinder").glob("length*"))


def test_an_interrupted_preparation_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("lra.tasks.pathfinder.CHUNK_PIXELS", 10 * 1024)
    config = Config(**SMALL)
    made = Counter()
    original = Shards._save

    def counting(path: Path, packed: np.ndarray) -> None:
        made["shards"] += 1
        if made["shards"] == 5:
            raise KeyboardInterrupt
        original(path, packed)

    monkeypatch.setattr(Shards, "_save", staticmethod(counting))
    with pytest.raises(KeyboardInterrupt):
        Pathfinder.prepare(config, tmp_path, ignore)
    assert not list((tmp_path / "pathfinder").glob("length*"))
    (shards,) = (tmp_path / "pathfinder").glob(".*.shards")
    victim = sorted(shards.glob("*.npy"))[0]
    victim.write_bytes(victim.read_bytes()[:100])  # a damaged one is made again
    folder = Pathfinder.prepare(config, tmp_path, ignore)
    assert made["shards"] == 5 + 9 - 4 + 1  # nine chunks of ten rows at most; four were there, one of them damaged
    whole = Pathfinder.prepare(config, tmp_path / "whole", ignore)
    assert (folder / "train.tokens.bin").read_bytes() == (whole / "train.tokens.bin").read_bytes()


def test_verify_finds_an_altered_label(tmp_path):
    import hashlib

    config = Config(**SMALL)
    folder = Pathfinder.prepare(config, tmp_path, ignore)
    labels = np.fromfile(folder / "test.labels.bin", "<i8")
    swapped = labels.copy()
    i, j = 0, np.flatnonzero(labels != labels[0])[0]
    swapped[[i, j]] = labels[[j, i]]
    (folder / "test.labels.bin").write_bytes(swapped.tobytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["test"]["files"]["labels"]["sha256"] = hashlib.sha256(swapped.tobytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="expected labels of test from row 0 as the contours give them"):
        Pathfinder.verify(config, tmp_path)


def test_pixels_of_s4_are_numbers(tmp_path):
    config = Config(fidelity="s4", **SMALL)
    Pathfinder.prepare(config, tmp_path, ignore)
    assert Pathfinder.load(config, tmp_path)[0].pixels == (0.0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1000}, r"task.length=1000: pathfinder has images of 256 \(16 x 16\), 1024"),
        ({"difficulty": "x"}, r"task.difficulty='x' is unknown; choose easy | intermediate | hard"),
        ({"length": 256, "difficulty": "easy"}, "16 x 16 have hard only"),
        ({"source": "hub"}, r"task.source=hub: pathfinder takes auto | generated | release"),
        ({"fidelity": "x"}, r"task.fidelity='x': pathfinder takes lra | s4"),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        Pathfinder.load(Config(**options), tmp_path)


def test_path_x_has_larger_images():
    with pytest.raises(UserError, match=r"pathx has images of 4096 \(64 x 64\), 16384"):
        PathX.check(PathXConfig(length=1024))
    PathX.check(PathXConfig())
    assert load("pathx") is PathX
    assert PathXConfig().length == 16_384


def release_folder(folder, rows=40, side=32, set_name="curv_contour_length_14"):
    """A set in the layout of the release, with random pictures."""
    rng = np.random.default_rng(0)
    base = folder / f"pathfinder{side}" / set_name
    (base / "metadata").mkdir(parents=True)
    for k in range(2):
        (base / "imgs" / str(k)).mkdir(parents=True)
        lines = []
        for i in range(rows // 2):
            pixels = rng.integers(0, 256, (side, side), dtype=np.uint8)
            Image.fromarray(pixels).save(base / "imgs" / str(k) / f"sample_{i}.png")
            lines.append(f"imgs/{k} sample_{i}.png {i} {int(rng.integers(2))} 1.0 14 4 2 0.5 1 6")
        (base / "metadata" / f"{k}.npy").write_text("\n".join(lines) + "\n")
    return base


@pytest.mark.parametrize("fidelity", ["lra", "s4"])
def test_release_rows_equal_the_files(tmp_path, fidelity):
    base = release_folder(tmp_path / "lra_release")
    config = Config(source=str(tmp_path / "lra_release"), fidelity=fidelity)
    Pathfinder.prepare(config, tmp_path / "data", ignore)
    info, splits = Pathfinder.load(config, tmp_path / "data")
    assert info.splits == {"train": 32, "validation": 4, "test": 4}
    # independent reading: all lines in order, then the positions of the split
    lines = [line.split() for k in range(2) for line in (base / "metadata" / f"{k}.npy").read_text().splitlines()]
    seen = []
    for name, ids in split_ids(40, fidelity).items():
        for row, i in enumerate(ids):
            pixels = np.asarray(Image.open(base / lines[i][0] / lines[i][1]))
            assert np.array_equal(splits[name].row(row).reshape(32, 32), pixels)
            assert splits[name].labels[row] == int(lines[i][3])
        seen += ids.tolist()
    assert sorted(seen) == list(range(40))
    assert "labels and images equal those of" in "\n".join(Pathfinder.verify(config, tmp_path / "data"))


def test_a_picture_named_again_is_one_row(tmp_path):
    base = release_folder(tmp_path / "lra_release")
    path = base / "metadata" / "0.npy"
    path.write_text(path.read_text() + "\n".join(path.read_text().splitlines()[:8]) + "\n")
    config = Config(source=str(tmp_path / "lra_release"))
    Pathfinder.prepare(config, tmp_path / "data", ignore)
    info, splits = Pathfinder.load(config, tmp_path / "data")
    assert sum(info.splits.values()) == 40
    rows = [split.row(i).tobytes() for split in splits.values() for i in range(len(split))]
    assert len(set(rows)) == 40
    assert Pathfinder.verify(config, tmp_path / "data")
    manifest = json.loads((Pathfinder.folder(config, tmp_path / "data") / "manifest.json").read_text())
    assert manifest["details"]["exact"].endswith("; 8 lines name a picture again and are left out")


def test_finished_images_that_stay_after_a_failure_are_told(tmp_path, caplog):
    def stop(done, total):
        raise KeyboardInterrupt

    config = Config(length=256, train_rows=20, validation_rows=8, test_rows=8)
    with pytest.raises(KeyboardInterrupt):
        Pathfinder.prepare(config, tmp_path, stop)
    (told,) = [message for message in caplog.messages if "finished images" in message]
    assert ".shards keeps 0.0 MiB" in told
    assert "the same command goes on" in told


def test_auto_takes_the_release_where_it_is(tmp_path):
    release_folder(tmp_path / "lra_release" / "lra_release")
    assert Pathfinder.resolved(Config(), tmp_path).source == "release"
    assert Pathfinder.resolved(Config(length=4096), tmp_path).source == "generated"
    Pathfinder.prepare(Config(), tmp_path, ignore)
    assert Pathfinder.load(Config(), tmp_path)[0].splits["train"] == 32


def broken(base, what):
    metadata = base / "metadata" / "1.npy"
    lines = metadata.read_text().splitlines()
    if what == "missing picture":
        (base / "imgs" / "1" / "sample_3.png").unlink()
    elif what == "no image":
        (base / "imgs" / "1" / "sample_3.png").write_bytes(b"no image at all")
    elif what == "cut image":
        path = base / "imgs" / "1" / "sample_3.png"
        path.write_bytes(path.read_bytes()[:80])
    elif what == "empty image":
        (base / "imgs" / "1" / "sample_3.png").write_bytes(b"")
    elif what == "other size":
        Image.new("L", (64, 64)).save(base / "imgs" / "1" / "sample_3.png")
    elif what == "label":
        metadata.write_text("\n".join([*lines[:3], lines[3].replace(" 3 ", " 3 2 ", 1), *lines[4:]]))
    elif what == "fields":
        metadata.write_text("\n".join([*lines[:3], "imgs/1 sample_3.png", *lines[4:]]))
    elif what == "outside":
        metadata.write_text("\n".join([*lines[:3], lines[3].replace("imgs/1", "../../../etc"), *lines[4:]]))
    elif what == "empty metadata":
        for path in (base / "metadata").iterdir():
            path.write_text("\n")
    elif what in ("pipe", "pipe of metadata"):
        place = metadata if what == "pipe of metadata" else base / "imgs" / "1" / "sample_3.png"
        place.unlink()
        os.mkfifo(place)
    elif what == "no metadata":
        shutil.rmtree(base / "metadata")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing picture", r"sample_3.png: missing, but .*metadata/1.npy:4 names it"),
        ("no image", r"sample_3.png: not a readable image .*metadata/1.npy:4"),
        ("cut image", r"sample_3.png: not a readable image"),
        ("empty image", r"sample_3.png: not a readable image"),
        ("other size", r"sample_3.png: expected 32 x 32 pixels of 8 bits, found 64 x 64"),
        ("label", r"1.npy:4: expected a label 0 or 1 as field 4, found '2'"),
        ("fields", r"1.npy:4: expected at least 4 fields, found 2"),
        ("outside", r"1.npy:4: expected a file below"),
        ("empty metadata", r"curv_contour_length_14/metadata: expected a line for every image, found none"),
        ("pipe", r"sample_3.png: expected a file, found something else .*metadata/1.npy:4"),
        ("pipe of metadata", r"metadata/1.npy: expected a file, found something else"),
        ("no metadata", r"expected curv_contour_length_14/imgs and .*/metadata in it, found neither"),
    ],
)
def test_what_is_wrong_with_a_release_is_named(tmp_path, what, message):
    base = release_folder(tmp_path / "release")
    broken(base, what)
    with pytest.raises(UserError, match=message):
        Pathfinder.prepare(Config(source=str(tmp_path / "release")), tmp_path / "data", ignore)
    assert not list((tmp_path / "data").glob("pathfinder/length*"))


def test_the_known_empty_file_is_left_out(tmp_path):
    base = release_folder(tmp_path / "release", rows=400, set_name="curv_baseline")
    bad = base.parent.parent / KNOWN_BAD
    assert bad.is_file()
    bad.write_bytes(b"")
    config = Config(source=str(tmp_path / "release"), difficulty="easy")
    Pathfinder.prepare(config, tmp_path / "data", ignore)
    assert sum(Pathfinder.load(config, tmp_path / "data")[0].splits.values()) == 399


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real images in {REAL}")
@pytest.mark.parametrize(("task", "config", "rows"), [(Pathfinder, Config, 400), (PathX, PathXConfig, 64)])
def test_images_of_the_published_generator(tmp_path, task, config, rows):
    options = config(source=str(REAL))
    task.prepare(options, tmp_path, ignore)
    info, _ = task.load(options, tmp_path)
    assert sum(info.splits.values()) == rows
    assert "images equal those of" in "\n".join(task.verify(options, tmp_path))
