"""Pictures and tables of the Pathfinder generator against Pillow, which the public generator draws with."""

import math
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw

from lra.tasks.pathfinder_parameters import parameters
from lra.tasks.pathfinder_sprites import draw_line, scale_down, tables


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_lines_are_those_of_pillow(width):
    middle, side = 14, 29
    for degrees in range(360):
        end = [middle + math.ceil(10 * part(math.radians(degrees))) for part in (math.sin, math.cos)]
        image = Image.new("L", (side, side))
        ImageDraw.Draw(image).line([(middle, middle), (end[1], end[0])], fill=255, width=width)
        ours = draw_line(side, (middle, middle), (end[0], end[1]), width)
        # Pillow's lines have changed before: a pixel may differ
        assert (ours != np.asarray(image)).sum() <= 1, degrees


@pytest.mark.parametrize(("large", "small"), [(17, 9), (41, 21), (64, 32)])
def test_scaling_is_the_lanczos_of_pillow(large, small):
    image = np.random.default_rng(0).choice([0, 255], (large, large)).astype(np.uint8)
    theirs = np.asarray(Image.fromarray(image).resize((small, small), Image.Resampling.LANCZOS))
    assert np.array_equal(scale_down(image, small), theirs)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_markers_are_discs_wherever_they_lie(size):
    settings = parameters(size)
    pictures = tables(settings, settings.paddle_margins[0]).markers
    reach = pictures.shape[-1] // 2
    for y in (2, 4, size // 2, size - 3):
        for x in (1, size // 2, size - 5):
            rows, columns = np.ogrid[-2 * y : 2 * (size - y), -2 * x : 2 * (size - x)]
            disc = 255 * (rows**2 + columns**2 <= (2 * settings.marker_radius) ** 2)
            theirs = Image.fromarray(disc.astype(np.uint8)).resize((size, size), Image.Resampling.LANCZOS)
            # places within reach of a border have a class each, all others share one
            classes = [min(v, reach) if v < size - reach else reach + 1 + v - (size - reach) for v in (y, x)]
            canvas = np.zeros((size + 2 * reach, size + 2 * reach), np.uint8)
            canvas[y : y + 2 * reach + 1, x : x + 2 * reach + 1] = pictures[tuple(classes)]
            assert np.array_equal(canvas[reach:-reach, reach:-reach], np.asarray(theirs)), (y, x)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_turns_are_likeliest_straight_on_and_end_where_continuity_says(size):
    settings = parameters(size)
    for margin in settings.paddle_margins:
        t = tables(settings, margin)
        ring = np.arctan2(t.ring[:, 0], t.ring[:, 1])
        # along the x axis: a quarter turn is straight enough if continuity is 1, less if it is larger
        turns = np.abs(ring)
        assert turns[t.weights[180] > 0].max() < math.pi / 2 / settings.continuity
        assert t.weights[180].argmax() == turns.argmin()
        radius = np.hypot(t.ring[:, 0], t.ring[:, 1])
        assert np.abs(radius - settings.paddle_length - margin).max() < math.sqrt(2)


def test_steps_at_right_angles_carry_the_last_digit_of_a_sine():
    """2 + 4 cos(90 degrees) is the double after 2, which rounds up to 3; at 4 the same digit is lost."""
    forward = tables(parameters(32), 1).forward
    assert forward[270, 2].tolist() == [4, 1]
    assert forward[270, 4].tolist() == [4, 0]


def test_no_direction_starts_where_the_public_generator_finds_no_room():
    t = tables(parameters(32), 1)
    for direction in range(360):
        offsets = t.footprint[t.footprint_starts[direction] : t.footprint_starts[direction + 1]]
        for corner in ((0, 0), (0, 31), (31, 0), (31, 31)) if len(offsets) else ():
            places = offsets + corner
            assert ((places >= 0) & (places < 32)).all(axis=1).any()


def test_the_generator_needs_no_torch():
    code = (
        "import sys; from lra.tasks.pathfinder_generator import available; available(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
