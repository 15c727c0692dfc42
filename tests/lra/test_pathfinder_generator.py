"""The Pathfinder generator: kernels that agree to the byte, provable labels, statistics of the public generator."""

import dataclasses
import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lra.errors import UserError
from lra.tasks import pathfinder_generator as generator
from lra.tasks.pathfinder_check import connected, problems
from lra.tasks.pathfinder_generator import Samples, generate, parameters, stream
from tests import golden

SAMPLE = golden.FOLDER.parent / "data" / "pathfinder" / "upstream_generator_sample"
SIZES = (16, 32, 64, 128, 256)
COUNTS = {16: 400, 32: 400, 64: 24, 128: 40, 256: 24}
"""Images that take about a second a size."""

needs_cpp = pytest.mark.skipif(
    generator.available()["cpp"] is not None, reason=f"no C++ kernel here: {generator.available()['cpp']}"
)


def equal(a: Samples, b: Samples) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@needs_cpp
@pytest.mark.parametrize(
    ("size", "difficulty", "count"),
    [(16, "hard", 60), (32, "hard", 12), (64, "easy", 12), (128, "easy", 6), (256, "intermediate", 2)],
)
def test_kernels_give_the_same_bytes(size, difficulty, count):
    settings = parameters(size, difficulty)
    fast = generate(settings, 11, 1_000_000, count, kernel="cpp")
    assert equal(fast, generate(settings, 11, 1_000_000, count, kernel="python"))


@needs_cpp
@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(64, 4), (128, 3), (256, 6)])
def test_kernels_give_the_same_bytes_for_long_contours(size, count):
    settings = parameters(size)
    fast = generate(settings, 12, 0, count, kernel="cpp")
    assert equal(fast, generate(settings, 12, 0, count, kernel="python"))


@needs_cpp
def test_an_image_depends_on_seed_and_index_alone():
    settings = parameters(32)
    whole = generate(settings, 3, 0, 200, workers=1)
    assert equal(whole, generate(settings, 3, 0, 200, workers=5))
    assert equal(Samples(*(a[70:90] for a in whole)), generate(settings, 3, 70, 20, workers=2))
    parts = list(stream(settings, 3, 40, 200, chunk=70))
    assert [len(part.labels) for part in parts] == [70, 70, 20]
    assert equal(Samples(*(a[40:] for a in whole)), Samples(*map(np.concatenate, zip(*parts))))
    assert len(np.unique(whole.images.reshape(200, -1), axis=0)) == 200
    other = generate(settings, 4, 0, 200)
    assert not (other.images == whole.images).all(axis=(1, 2)).any()


def test_a_plain_kernel_makes_one_image_whatever_comes_before():
    settings = parameters(16)
    whole = generate(settings, 2**40, 2**41, 5, kernel="python")
    assert equal(Samples(*(a[3:] for a in whole)), generate(settings, 2**40, 2**41 + 3, 2, kernel="python"))


def test_the_random_numbers_are_splitmix64():
    # of the reference implementation started at 0, upper halves
    random = generator.growth.Random.__new__(generator.growth.Random)
    random._state = 0
    assert [random.below(2**32) for _ in range(3)] == [0xE220A839, 0x6E789E6A, 0x06C45D18]


def test_rows_made_earlier_are_made_again():
    """A change of this digest is a change of the data: raise the version of the task with it."""
    digest = hashlib.sha256()
    for size, count in ((16, 8), (32, 4)):
        for array in generate(parameters(size), 0, 0, count, kernel="python"):
            digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == "cc7fe8dc1037c940"


@needs_cpp
@pytest.mark.parametrize("size", SIZES)
def test_labels_follow_from_the_geometry(size):
    settings = parameters(size)
    samples = generate(settings, 5, 0, COUNTS[size])
    assert problems(settings, samples) == []
    # Bernoulli(1/2), and the margins of 128 too: within four deviations
    slack = 4 * 0.5 / COUNTS[size] ** 0.5
    assert abs(samples.labels.mean() - 0.5) < slack
    for margin in settings.paddle_margins:
        assert abs((samples.margins == margin).mean() - 1 / len(settings.paddle_margins)) < slack
    assert samples.distractors.max() <= settings.distractors


@needs_cpp
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.labels.__setitem__(7, 1 - s.labels[7]), "label"),
        (lambda s: s.markers.__setitem__((7, 0), s.markers[7, 0] + 1), "label"),
        (lambda s: s.paddles.__setitem__((7, 0, 5), s.paddles[7, 0, 9]), "gaps"),
        (lambda s: s.paddles.__setitem__((7, 0, 5, 0), -1), "inside"),
        (lambda s: s.images.__setitem__(7, s.images[8]), "visible"),
        (lambda s: s.images.__setitem__(7, s.images[7] // 2), "intensities"),
    ],
    ids=["label", "marker", "contour", "outside", "other image", "darker"],
)
def test_the_check_finds_what_is_wrong(spoil, message):
    settings = parameters(32)
    samples = generate(settings, 5, 0, 20)
    spoil(samples)
    found = problems(settings, samples)
    assert any(message in line and line.endswith("in 1 of 20 images, first in 7") for line in found), found


def test_connected_by_hand():
    contours = np.array([[[[1, 1, 1, 3], [1, 5, 1, 7]], [[9, 1, 9, 3], [9, 5, 9, 7]]]] * 5)
    markers = np.array([[[1, 1], [1, 7]], [[9, 1], [1, 7]], [[9, 7], [9, 1]], [[1, 3], [1, 7]], [[1, 1], [1, 1]]])
    assert connected(contours, markers).tolist() == [1, 0, 1, -1, -1]


def test_unknown_requests_say_what_there_is():
    with pytest.raises(UserError, match="size 48, hard.*choose size 16"):
        parameters(48)
    with pytest.raises(UserError, match="'harder' is unknown; choose one of hard, intermediate, easy"):
        parameters(32, "harder")
    with pytest.raises(UserError, match="choose one of auto, cpp, python"):
        generate(parameters(16), 0, 0, 1, kernel="cuda")
    with pytest.raises(UserError, match="from 0 to"):
        generate(parameters(16), -1, 0, 1)


@needs_cpp
@pytest.mark.parametrize("kernel", ["cpp", "python"])
def test_contours_without_room_are_an_error(kernel, monkeypatch):
    monkeypatch.setattr(generator.growth, "MOST_ATTEMPTS", 20)
    crowded = dataclasses.replace(parameters(16), contour_length=40)
    with pytest.raises(UserError, match="Pathfinder image 6 of seed 0.*no room in 16x16 pixels after 20 attempts"):
        generate(crowded, 0, 6, 3, kernel=kernel)


def test_pictures_too_large_for_the_compiled_kernel_are_refused():
    large = dataclasses.replace(parameters(128), paddle_length=14)
    with pytest.raises(UserError, match="cannot run"):
        generate(large, 0, 0, 1, kernel="cpp")


def test_without_a_compiler_the_plain_kernel_runs_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(generator.native, "missing", lambda: "there is no C++ compiler; install g++")
    generator._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        samples = generate(parameters(16), 0, 0, 2)
    assert "install g++" in caplog.text
    assert equal(samples, generate(parameters(16), 0, 0, 2, kernel="python"))
    with pytest.raises(UserError, match="install g\\+\\+"):
        generate(parameters(16), 0, 0, 2, kernel="cpp")


def public(size: int) -> tuple[np.ndarray, list[list[str]]]:
    """Images (N, S, S) and metadata of the public generator."""
    folder = SAMPLE / f"pathfinder{size}" / "curv_contour_length_14"
    if not folder.is_dir():
        pytest.skip(f"no sample of the public generator beside this checkout: {folder} is missing")
    rows = [line.split() for line in Path(folder / "metadata" / "0.npy").read_text().splitlines()]
    return np.stack([np.array(Image.open(folder / row[0] / row[1])) for row in rows]), rows


def statistics(images: np.ndarray) -> dict[str, np.ndarray]:
    """Of every image, (N,) each."""
    flat = images.reshape(len(images), -1).astype(float)
    rows = images.astype(float)
    # all but the solid middle of a marker has something dark in its 3 x 3 neighbourhood
    size = images.shape[1]
    around = [images[:, i : size - 2 + i, j : size - 2 + j] for i in range(3) for j in range(3)]
    solid = np.minimum.reduce(around) >= 150
    return {
        "mean": flat.mean(axis=1),
        "deviation": flat.std(axis=1),
        "share of zeros": (flat == 0).mean(axis=1),
        **{f"share >= {level}": (flat >= level).mean(axis=1) for level in (8, 64, 128, 192, 235)},
        "marker size": solid.sum(axis=(1, 2)).astype(float),
        "ink in the middle": rows[:, size // 4 : -size // 4, size // 4 : -size // 4].mean(axis=(1, 2)),
        "ink at the border": rows[:, : size // 8].mean(axis=(1, 2)),
        "edges": np.abs(np.diff(rows, axis=2)).mean(axis=(1, 2)),
        # a rounding that prefers one pixel shows here: ink of every 32nd of the width and of the height
        **{f"column {i}": part.mean(axis=(1, 2)) for i, part in enumerate(np.split(rows, 32, axis=2))},
        **{f"row {i}": part.mean(axis=(1, 2)) for i, part in enumerate(np.split(rows, 32, axis=1))},
    }


def deviations(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """By how many standard errors each statistic's mean differs."""
    pairs = zip(statistics(ours).items(), statistics(theirs).values())
    errors = {name: (a.mean() - b.mean(), (a.var() / len(a) + b.var() / len(b)) ** 0.5) for (name, a), b in pairs}
    return {name: difference / error for name, (difference, error) in errors.items() if error}


@needs_cpp
@pytest.mark.parametrize(("size", "count"), [(32, 4000), (128, 160)])
def test_statistics_are_those_of_the_public_generator(size, count):
    theirs, _ = public(size)
    found = deviations(generate(parameters(size), 8, 0, count).images, theirs)
    # of some 70 figures one in a thousand times
    assert max(map(abs, found.values())) < 4.3, found


@needs_cpp
@pytest.mark.parametrize(
    "change", [{"distractors": 2}, {"paddle_contrast": 1.0}, {"marker_radius": 2.0}, {"contour_length": 13}]
)
def test_the_statistics_notice_other_parameters(change):
    theirs, _ = public(32)
    other = dataclasses.replace(parameters(32), **change)
    found = deviations(generate(other, 8, 0, 2000).images, theirs)
    assert max(map(abs, found.values())) > 6, found


@pytest.mark.parametrize("size", [32, 128])
def test_metadata_of_the_public_generator_has_our_parameters(size):
    _, rows = public(size)
    settings = parameters(size)
    assert {tuple(map(float, row[4:9])) for row in rows} == {
        (
            settings.continuity,
            settings.contour_length,
            settings.distractor_length,
            settings.paddle_length,
            settings.paddle_thickness,
        )
    }
    assert {int(row[9]) for row in rows} == set(settings.paddle_margins)


def told_apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Share of held-out images that a small network, trained on three quarters, puts on the right side."""
    torch.manual_seed(0)
    images = torch.from_numpy(np.concatenate([ours, theirs])).float()[:, None] / 255
    labels = torch.arange(len(images)) // len(ours)
    order = torch.randperm(len(images))
    train, test = order[: 3 * len(order) // 4], order[3 * len(order) // 4 :]
    net = nn.Sequential(
        *(nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        nn.Linear(96, 2),
    )
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(15):
        for batch in train[torch.randperm(len(train))].split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return (net.eval()(images[test]).argmax(1) == labels[test]).float().mean().item()


@needs_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "apart"), [({}, False), ({"paddle_contrast": 0.9}, True), ({"marker_radius": 1.0}, True)]
)
def test_a_network_cannot_tell_ours_from_the_public_generators(change, apart):
    theirs, _ = public(32)
    settings = dataclasses.replace(parameters(32), **change)
    share = told_apart(generate(settings, 9, 0, len(theirs)).images, theirs)
    # chance is a half, with a deviation of 3.5 % on 200 held-out images
    assert (share > 0.64) == apart, share
