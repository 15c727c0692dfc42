"""Image: pixels by hand and by other arithmetic, real CIFAR-10, and what is said of pictures that are not right."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image as Pillow

from lra.data import splits
from lra.data.loader import make_batch
from lra.errors import UserError
from lra.tasks import image, load
from lra.tasks.image import Config, Image
from lra.tasks.image_pixels import GRAY, again, decode, pillow_gray, resample, tensorflow_gray
from tests.lra.png_reference import read_png

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "image"
LOSSLESS = REAL / "cifar10-train-first4000-lossless.parquet"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"no real CIFAR-10 in {REAL}")
ROWS = {"train": 40, "test": 12}
VALIDATION = [31, 34, 36, 39]


def ignore(done, total):
    """Progress that nobody watches."""


def png(pixels, kind="PNG"):
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, kind)
    return file.getvalue()


def one_colour(*rgb):
    return np.broadcast_to(np.array(rgb, np.uint8), (1, 1, 1, 3))


def pictures(rows, seed):
    return np.random.default_rng(seed).integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)


def write(folder, **changes):
    """A small data set in the Hub's layout; ``changes`` maps a split to (row, column, value)."""
    for seed, (split, rows) in enumerate(ROWS.items()):
        images = [{"bytes": png(picture), "path": None} for picture in pictures(rows, seed)]
        labels = [i % 10 for i in range(rows)]
        if split in changes:
            row, column, value = changes[split]
            if column == "img":
                images[row] = {"bytes": value, "path": None}
            else:
                labels[row] = value
        path = folder / "plain_text" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        table = {"img": pyarrow.array(images, kind), "label": pyarrow.array(labels, "int64")}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    return folder


# colour -> level: .2989 r + .5870 g + .1140 b, times 255.5 / 255, cut; and the ITU luma, rounded
@pytest.mark.parametrize(
    ("colour", "lra", "s4"),
    [
        ((0, 0, 0), 0, 0),  # black
        ((255, 255, 255), 255, 255),  # .9999 * 255.5 = 255.47
        ((255, 0, 0), 76, 76),  # .2989 * 255.5 = 76.37; 76.245
        ((0, 255, 0), 149, 150),  # .5870 * 255.5 = 149.98; 149.685
        ((0, 0, 255), 29, 29),  # .1140 * 255.5 = 29.13; 29.07
        ((59, 62, 63), 61, 61),  # 61.21 * 1.00196 = 61.33; 61.217
        ((10, 20, 30), 18, 18),  # 18.149 * 1.00196 = 18.18; 18.15
        ((1, 1, 1), 1, 1),  # .9999 * 1.00196 = 1.0019
        ((200, 3, 250), 90, 90),  # 90.041 * 1.00196 = 90.22; 90.061
        ((7, 7, 254), 35, 35),  # 35.157 * 1.00196 = 35.23; 35.16
        ((2, 1, 2), 1, 1),  # 1.4128 * 1.00196 = 1.42; 1.413
        ((1, 2, 1), 1, 2),  # 1.5869 * 1.00196 = 1.59, cut; 1.587, rounded
    ],
)
def test_gray_levels_by_hand(colour, lra, s4):
    assert tensorflow_gray(one_colour(*colour)).item() == lra
    assert pillow_gray(one_colour(*colour)).item() == s4


def test_gray_of_every_64th_colour_is_tensorflows_float32():
    steps = np.arange(256, dtype=np.uint8)
    rgb = np.stack(np.meshgrid(steps[::4], steps[::4], steps[::4], indexing="ij"), axis=-1).reshape(1, 512, 512, 3)
    scaled = rgb.astype(np.float32) * np.float32(1 / 255)
    weighted = scaled[..., 0] * np.float32(0.2989) + scaled[..., 1] * np.float32(0.5870)
    float32 = ((weighted + scaled[..., 2] * np.float32(0.1140)) * np.float32(255.5)).astype(np.uint8)
    differ = tensorflow_gray(rgb) != float32
    # sums so near to a whole level that float32 passes it: 237 of all 2 ** 24 colours
    assert differ.mean() < 1e-4
    # lra-facts of this project's background: TensorFlow's and Pillow's gray differ for 26 % of random colours
    assert (tensorflow_gray(rgb) != pillow_gray(rgb)).mean() == pytest.approx(0.26, abs=0.01)


def test_area_resampling_by_hand():
    gray = np.zeros((1, 32, 32), np.uint8)
    gray[0, :2, :4] = [[1, 2, 255, 255], [3, 4, 255, 254]]
    # (1 + 2 + 3 + 4) / 4 = 2.5, up; 1019 / 4 = 254.75
    assert resample(gray, 16)[0, 0, :3].tolist() == [3, 255, 0]
    assert (resample(gray, 32) == gray).all()
    large = resample(gray, 64)
    assert large[0, :4, :6].tolist() == [[1, 1, 2, 2, 255, 255]] * 2 + [[3, 3, 4, 4, 255, 255]] * 2
    assert (resample(resample(gray, 128), 32) == gray).all()


@pytest.mark.parametrize("fidelity", GRAY)
@pytest.mark.parametrize("side", [16, 32, 64, 128])
def test_the_second_way_gives_the_same(fidelity, side):
    rgb = pictures(20, 3)
    assert (resample(GRAY[fidelity](rgb), side) == again(rgb, fidelity, side)).all()


@pytest.mark.parametrize(("length", "side"), [(256, 16), (1024, 32), (4096, 64), (16_384, 128)])
def test_rows_are_pixels_row_after_row(tmp_path, length, side):
    config = Config(length=length, source=str(write(tmp_path / "cifar")))
    Image.prepare(config, tmp_path, ignore)
    info, parts = Image.load(config, tmp_path)
    assert info.splits == {"train": 36, "validation": 4, "test": 12}
    assert (info.vocab_size, info.num_classes, info.length, info.pixels) == (256, 10, length, None)
    assert ["adds no information" in warning for warning in info.warnings] == [True] * (side > 32) + [False]
    assert info.warnings[-1].startswith("the pictures are not the files of uoft-cs/cifar10")
    rgb = pictures(40, 0)[VALIDATION].astype(float)
    gray = np.floor(255.5 / 255 * (0.2989 * rgb[..., 0] + 0.587 * rgb[..., 1] + 0.114 * rgb[..., 2]))
    for i in range(4):
        row = parts["validation"].row(i).reshape(side, side)
        for y, x in ((0, 0), (3, 11), (side - 1, side - 1)):
            if side == 16:
                expected = np.floor(gray[i, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].mean() + 0.5)
            else:
                expected = gray[i, y * 32 // side, x * 32 // side]
            assert row[y, x] == expected
    assert parts["validation"].labels.tolist() == [i % 10 for i in VALIDATION]
    facts = Image.verify(config, tmp_path)
    assert "52 pictures decoded again from" in facts[-1]


def test_s4_pixels_are_pillows_luma_and_normalised(tmp_path):
    config = Config(fidelity="s4", source=str(write(tmp_path / "cifar")))
    Image.prepare(config, tmp_path, ignore)
    info, parts = Image.load(config, tmp_path)
    assert info.pixels == pytest.approx((0.480784, 0.239216), abs=1e-6)
    # S4's random_split of 40 rows: the last four of its permutation
    order = torch.randperm(40, generator=torch.Generator().manual_seed(42)).tolist()
    expected = np.asarray(Pillow.fromarray(pictures(40, 0)[sorted(order[36:])[1]]).convert("L"))
    assert (parts["validation"].row(1).reshape(32, 32) == expected).all()
    assert "52 pictures decoded again from" in Image.verify(config, tmp_path)[-1]


def test_a_black_pixel_is_a_token(tmp_path):
    black = np.zeros((32, 32, 3), np.uint8)
    config = Config(source=str(write(tmp_path / "cifar", test=(0, "img", png(black)))))
    Image.prepare(config, tmp_path, ignore)
    split = Image.load(config, tmp_path)[1]["test"]
    batch = make_batch(split, np.array([0, 1]), torch.device("cpu"))
    assert (batch.tokens[0] == 0).all()
    assert batch.key_mask.all()
    assert batch.real_tokens == batch.padded_tokens == 2 * 1024


def test_a_choice_of_rows_is_fixed_and_part_of_a_larger_one(tmp_path):
    source = str(write(tmp_path / "cifar"))
    rows = []
    for count in (5, 10):
        config = Config(length=256, source=source, train_rows=count, test_rows=count)
        Image.prepare(config, tmp_path, ignore)
        parts = Image.load(config, tmp_path)[1]
        rows.append({bytes(parts["train"].row(i).astype(np.uint8)) for i in range(count)})
        assert [len(part) for part in parts.values()] == [count, 4, count]
        assert "pictures decoded again" in Image.verify(config, tmp_path)[-1]
    assert len(rows[1]) == 10
    assert rows[0] < rows[1]
    with pytest.raises(UserError, match="task.train_rows=37: the source has 36 rows"):
        Image.prepare(Config(source=source, train_rows=37), tmp_path, ignore)


def test_only_chosen_pictures_are_decoded(tmp_path, monkeypatch):
    decoded = []
    monkeypatch.setattr(image, "decode", lambda data: decoded.append(data) or decode(data))
    config = Config(source=str(write(tmp_path / "cifar")), train_rows=5, test_rows=3)
    Image.prepare(config, tmp_path, ignore)
    assert len(decoded) == 5 + 4 + 3
    assert "12 pictures decoded again" in Image.verify(config, tmp_path)[-1]
    assert len(decoded) == 2 * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((7, "img", b"no picture"), "row 7 of {}: expected an encoded image, found 10 bytes that do not decode; get"),
        ((7, "img", png(pictures(1, 0)[0])[:900]), "row 7 of {}: expected an encoded image, found 900 bytes"),
        ((0, "img", png(np.zeros((32, 31, 3), np.uint8))), "row 0 of {}: expected 32 x 32 RGB, found 31 x 32 RGB"),
        ((11, "img", png(np.zeros((32, 32), np.uint8))), "row 11 of {}: expected 32 x 32 RGB, found 32 x 32 L;"),
        ((3, "label", 10), "row 3 of {}: expected a label 0..9, found 10; get the files of uoft-cs/cifar10 again"),
        ((3, "label", -1), "row 3 of {}: expected a label 0..9, found -1;"),
        ((3, "img", None), "column img of every row, found none in row 3"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_wrong_row_is_named(tmp_path, split, change, message):
    config = Config(source=str(write(tmp_path / "cifar", **{split: change})))
    with pytest.raises(UserError, match=message.format(split)):
        Image.prepare(config, tmp_path, ignore)
    assert not list((tmp_path / "image").glob("length*"))


def test_the_hubs_copy_has_all_rows_and_a_named_folder_what_it_has(tmp_path, monkeypatch):
    monkeypatch.delenv("LRA_HUB_DIR", raising=False)
    folder = write(tmp_path / "hub" / "uoft-cs" / "cifar10")
    with pytest.raises(
        UserError, match=rf"{folder}: expected 50000 rows in train as the Hub has, found 40; .*=.*cifar10"
    ):
        Image.prepare(Config(), tmp_path, ignore)
    monkeypatch.setitem(ROWS, "train", 9)
    with pytest.raises(UserError, match="expected 10 rows or more in train, found 9"):
        Image.prepare(Config(source=str(write(tmp_path / "nine"))), tmp_path, ignore)


def test_validation_is_the_published_choice():
    rows = {split: ids for split, (_, ids) in image._choice(Config(), image.ROWS).items()}
    published = splits.load("cifar10")
    for split in ("train", "validation"):
        assert (rows[split] == published[split]).all()
    assert [len(ids) for ids in rows.values()] == [45_000, 5_000, 10_000]
    # the method, written out: the first tenth by SHA-256, here of other numbers of rows
    order = sorted(range(40), key=lambda i: hashlib.sha256(f"0:cifar10:{i}".encode()).digest())
    assert sorted(order[:4]) == VALIDATION


def test_verify_finds_an_altered_pixel(tmp_path):
    config = Config(source=str(write(tmp_path / "cifar")))
    folder = Image.prepare(config, tmp_path, ignore)
    data = bytearray((folder / "test.tokens.bin").read_bytes())
    data[5 * 1024 + 17] ^= 1
    (folder / "test.tokens.bin").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["test"]["files"]["tokens"]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"expected row 5 of test to be picture 5 of test, found another; delete"):
        Image.verify(config, tmp_path)


def test_what_is_not_the_hubs_says_so(tmp_path, monkeypatch):
    config = Config(source=str(write(tmp_path / "cifar")))
    details = json.loads((Image.prepare(config, tmp_path, ignore) / "manifest.json").read_text())["details"]
    assert details["exact"].startswith("not the files of uoft-cs/cifar10 at 0b2714987fa4:")
    assert details["source_files"].keys() == {f"plain_text/{split}-00000-of-00001.parquet" for split in ROWS}
    monkeypatch.setattr(image, "SHA256", tuple(details["source_files"].values()))
    details = json.loads((Image.prepare(config, tmp_path / "b", ignore) / "manifest.json").read_text())["details"]
    assert details["exact"].startswith("the pictures of uoft-cs/cifar10 at 0b2714987fa4;")


def test_prepared_rows_outlive_their_source(tmp_path):
    config = Config(source=str(write(tmp_path / "cifar")))
    Image.prepare(config, tmp_path, ignore)
    (tmp_path / "cifar").rename(tmp_path / "elsewhere")
    Image.prepare(config, tmp_path, ignore)
    assert "not on this machine" in Image.verify(config, tmp_path)[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1000}, r"task.length=1000: .* takes 256 \(16 x 16\), 1024 \(32 x 32\), 4096 .*, 16384"),
        ({"fidelity": "mega"}, r"task.fidelity='mega': image takes lra \| s4"),
        ({"source": "generated"}, r"task.source=generated: image takes auto \| hub or a folder"),
        ({"train_rows": -1}, r"task.train_rows=-1"),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, message):
    for use in (Image.load, Image.verify, lambda c, d: Image.prepare(c, d, ignore)):
        with pytest.raises(UserError, match=message):
            use(Config(**options), tmp_path)


def test_yaml_and_registry_name_this_task():
    text = OmegaConf.load(ROOT / "conf" / "task" / "image.yaml")
    assert text.pop("defaults") == ["image_schema", "_self_"]
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), text)) == Config()
    assert load("image") is Image


@needs_real
def test_lossless_pictures_are_decoded_exactly():
    table = pyarrow.parquet.read_table(LOSSLESS)
    data = [picture["bytes"] for picture in table["img"].to_pylist()]
    rgb = np.stack([decode(picture) for picture in data])
    for i in range(0, 4000, 160):
        assert (read_png(data[i]) == rgb[i]).all()
    # the first picture of data_batch_1, a frog: its first pixels as everybody who opens CIFAR-10 sees them
    assert rgb[0, 0, :2].tolist() == [[59, 62, 63], [43, 46, 45]]
    counts = [396, 366, 420, 384, 422, 393, 414, 385, 407, 413]
    assert np.bincount(table["label"].to_numpy()).tolist() == counts
    red, green, blue = (rgb[..., i].astype(np.float64) for i in range(3))
    expected = np.floor((0.2989 * red + 0.5870 * green + 0.1140 * blue) * 255.5 / 255)
    assert (tensorflow_gray(rgb) == expected).all()
    # s4's mean and deviation are those of the whole of CIFAR-10
    luma = pillow_gray(rgb)
    assert luma.mean() == pytest.approx(122.6, abs=1.5)
    assert luma.std() == pytest.approx(61.0, abs=1.5)


@needs_real
@pytest.mark.slow
def test_the_whole_of_cifar10(tmp_path):
    config = Config(source=str(REAL / "uoft-cs" / "cifar10"))
    Image.prepare(config, tmp_path, ignore)
    info, parts = Image.load(config, tmp_path)
    assert info.splits == {"train": 45_000, "validation": 5_000, "test": 10_000}
    assert info.majority_baseline == 0.1
    train, validation = (np.bincount(parts[name].labels) for name in ("train", "validation"))
    assert (train + validation).tolist() == [5000] * 10
    assert np.bincount(parts["test"].labels).tolist() == [1000] * 10
    assert np.asarray(parts["train"].tokens).mean() == pytest.approx(122, abs=1)
    assert "60000 pictures decoded again" in Image.verify(config, tmp_path)[-1]
