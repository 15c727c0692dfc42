"""The picture is a PNG that shows what it was given."""

import io

import matplotlib.image
import numpy as np
import pytest

from lra import plot
from lra.cells import Cell, Column
from lra.plot import PALETTE, draw

MIB = 2**20


def make_cell(backend, accuracy=0.4, speed=1000.0, memory=100 * MIB, task="listops", **values):
    values = {"statuses": {"ok": 1}, "majority": 0.17, "device_names": ["CPU A"], **values}
    cell = Cell(backend, Column("quick", "0123456789", task, "1", 2000, "long"), accuracy=accuracy, **values)
    cell.tokens_per_second, cell.peak_memory_bytes = speed, memory
    return cell


def pixels(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return matplotlib.image.imread(io.BytesIO(png), format="png")[..., :3]


def area(image, colour, tolerance=0.2):
    target = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    # bubbles are drawn at 85 % over white
    return int((np.abs(image - (0.85 * target + 0.15)).max(axis=-1) < tolerance / 4).sum())


def longest_line(image):
    """Largest share of a row or column of pixels that is not pale."""
    dark = image.mean(axis=-1) < 0.8
    return max(dark.mean(axis=0).max(), dark.mean(axis=1).max())


@pytest.mark.parametrize("panels", [1, 2, 10])
def test_a_panel_for_each_column(panels):
    cells = [make_cell(name, task=f"task{at}") for at in range(panels) for name in ("softmax", "flash")]
    image = pixels(draw(cells))
    assert image.std() > 0.02
    assert image.shape[0] > 600


def test_more_memory_is_a_larger_bubble():
    image = pixels(draw([make_cell("softmax", memory=400 * MIB), make_cell("flash", 0.3, 3000.0, 100 * MIB)]))
    ratio = area(image, PALETTE[0]) / area(image, PALETTE[1])
    assert 3 < ratio < 5.5


@pytest.mark.parametrize(
    "cells",
    [
        [make_cell("softmax", accuracy=None, speed=None, memory=None, statuses={"oom": 1})],
        [make_cell("softmax", memory=None), make_cell("flash", memory=None)],
        [make_cell("softmax", 0.17, 10.0, statuses={"stuck": 1}), make_cell("flash", 1.0, 1e6)],
        [make_cell("softmax", accuracy_std=0.0), make_cell("flash", accuracy_std=0.05)],
        [make_cell("softmax", interval=(0.38, 0.42), memory=1)],
        [make_cell(f"mixer{at}", 0.4 + at / 1000) for at in range(10)],
    ],
    ids=[
        "nothing-scored",
        "no-memory",
        "log-axis-and-stuck",
        "deviation",
        "interval-tiny-memory",
        "ten-close",
    ],
)
def test_awkward_cells_are_drawn(cells):
    assert pixels(draw(cells)).std() > 0.01


def test_a_column_without_a_point_has_no_panel():
    failed = {"accuracy": None, "speed": None, "memory": None, "statuses": {"oom": 1}}
    one = pixels(draw([make_cell("softmax")]))
    with_empty = pixels(draw([make_cell("softmax"), make_cell("softmax", task="text", **failed)]))
    assert with_empty.shape == one.shape  # and two panels are wider
    assert pixels(draw([make_cell("softmax"), make_cell("softmax", task="text")])).shape[1] > one.shape[1]
    # the line that names the column is all that was added: the axes move up for it
    assert (with_empty != one).any()
    nothing = pixels(draw([make_cell("softmax", **failed), make_cell("softmax", task="text", **failed)]))
    # words, without axes: those are lines through most of the picture
    assert 0 < longest_line(nothing) < 0.6 < longest_line(one)


def test_names_with_dollars_are_text():
    assert pixels(draw([make_cell("$\\frac{$"), make_cell("a$b$", device_names=["$x_{"])])).std() > 0.01


def test_the_same_cells_give_the_same_picture():
    cells = [make_cell("softmax"), make_cell("flash", 0.5, 2000.0)]
    assert draw(cells) == draw(cells)


@pytest.mark.parametrize("speeds", [(1000.0, 3000.0), (3000.0, 1000.0)])
def test_no_bubble_covers_the_label_of_the_majority_class(monkeypatch, speeds):
    boxes = []
    place = plot._place_on_line

    def noted(label, frame, solid, bars):
        box = place(label, frame, solid, bars)
        boxes.append((box, list(solid)))
        return box

    monkeypatch.setattr(plot, "_place_on_line", noted)
    # one bubble on the line, at its right or at its left end
    draw([make_cell("softmax", 0.165, speeds[0], 4000 * MIB), make_cell("flash", 0.6, speeds[1], 400 * MIB)])
    ((label, bubbles),) = boxes
    assert len(bubbles) >= 2
    assert not any(label.overlaps(bubble) for bubble in bubbles)


def test_no_error_bar_crosses_a_label_that_has_room_elsewhere(monkeypatch):
    monkeypatch.setattr(plot, "_png", lambda figure: figure)
    points = {"flash": (1000.0, 0.15), "rwkv4": (1900.0, 0.15)}
    # three panels are narrow: at either end of its line the label would reach a bar
    panels = draw(
        [
            make_cell(name, accuracy, speed, task=task, interval=(accuracy - 0.03, accuracy + 0.03))
            for task in ("a", "b", "c")
            for name, (speed, accuracy) in points.items()
        ]
    ).axes
    assert len(panels) == 3
    for axes in panels:
        for label in axes.texts:
            if label.get_text() not in ("majority class", *points):
                continue
            box = label.get_window_extent()
            for speed, accuracy in points.values():
                (x, low), (_, high) = axes.transData.transform(
                    [(speed, 100 * accuracy - 3), (speed, 100 * accuracy + 3)]
                )
                assert not (box.x0 < x < box.x1 and low < box.y1 and high > box.y0), label.get_text()
            assert axes.get_window_extent().padded(2).containsx(box.x1)
