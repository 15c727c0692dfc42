"""What the growth of Pathfinder contours looks up: small pictures of paddles and markers, offsets and turn weights.

A paddle has one of O directions: the 360 whole degrees that a contour may start in, then those from each of the K
pixels on a ring back to its centre, in which a contour continues. For each there is a picture of the line and one of
the area it claims. All that needs floating point happens here, once a process; growing contours is then a matter of
integers, which gives the same image in every kernel and on every machine.

A step of some length is rounded up to whole pixels in the public generator. Where it is a whole number but for the last
digit of a sine, as at right angles, it depends on the coordinate it starts from whether that digit counts: hence tables
by coordinate. The effect is small but not random, a column of pixels at the left border is rarer.

Coordinates are (y, x), angles in radians from the x to the y axis. Shapes: S height and width of the image, O
directions, K ring pixels, P, Q and R sides of a picture, E classes of a marker's place.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from lra.tasks.pathfinder_parameters import ANTIALIAS, Parameters

DEGREES = 360
UNIT = 1 << 16
"""Weight 1 of a turn."""
_COEFFICIENT_BITS = 22
_LOBES = 3


class Tables(NamedTuple):
    """Of one set of parameters and one margin; all arrays are C-contiguous."""

    lines: np.ndarray
    """uint8 (O, P, P): coverage of the pixels by a paddle that starts at the middle one."""
    areas: np.ndarray
    """uint8 (O, P, P): coverage by the area that the paddle keeps free of others."""
    surroundings: np.ndarray
    """uint8 (O, R, R): the most of ``areas`` within the margin of a pixel."""
    ends: np.ndarray
    """int8 (O, S, 2): from a paddle's middle pixel to its other end; of y and x, by the value of each."""
    forward: np.ndarray
    """int8 (O, S, 2): from the pivot of a paddle of the direction to that of its successor, likewise."""
    pivots: np.ndarray
    """int8 (360, S, 2): from a contour's first pixel to its first pivot, likewise."""
    footprint: np.ndarray
    """int32 (F, 2): pixels that must be free for a contour to start, relative to the first; direction by direction.

    A direction without any is never started in."""
    footprint_starts: np.ndarray
    """int32 (361,): where each direction's part of ``footprint`` begins and the last ends."""
    ring: np.ndarray
    """int32 (K, 2): where a paddle may end, relative to the pivot; ascending."""
    weights: np.ndarray
    """uint32 (O, K): of ending at a ring pixel after a paddle of a direction, in units of 1 / ``UNIT``."""
    disc: np.ndarray
    """int32 (N, 2): pixels within the margin."""
    neighbours: np.ndarray
    """int8 (360, S, 2): from the first pixel of one long contour to that of the other, likewise."""
    markers: np.ndarray
    """uint8 (E, E, Q, Q): a marker's picture by the class of its y and x, which tell its distance to two borders."""


@cache
def tables(parameters: Parameters, margin: int) -> Tables:
    """All that the images of ``parameters`` with ``margin`` need."""
    length, size = parameters.paddle_length, parameters.size
    starts = [math.radians(degrees) for degrees in range(-180, 180)]
    ring = _ring(length + margin)
    headings = [*starts, *(math.atan2(y, x) for y, x in ring)]
    # a contour's first paddle is drawn from its near end, every other one from its far end, a ring pixel
    drawn = [*starts, *map(_reverse, headings[DEGREES:])]
    pictures = [_paddle(parameters, margin, angle) for angle in drawn]
    areas = np.stack([area for _, area in pictures])
    footprints = [_footprint(areas[i], length + margin) for i in range(DEGREES)]
    ends = _steps(drawn, length, size)
    back = _steps([*map(_reverse, starts)], length + margin, size)
    landing = np.clip(np.arange(size)[:, None] + ends[:DEGREES], 0, size - 1)
    return Tables(
        lines=np.stack([line for line, _ in pictures]),
        areas=areas,
        surroundings=np.stack([_dilate(np.pad(area, margin), margin) for area in areas]),
        ends=ends,
        forward=_steps(headings, length + 2 * margin, size),
        pivots=ends[:DEGREES] + np.take_along_axis(back, landing, axis=1),
        footprint=np.concatenate(footprints),
        footprint_starts=np.cumsum([0, *map(len, footprints)]).astype(np.int32),
        ring=np.array(ring, np.int32),
        weights=np.array(
            [[_weight(h, r, parameters.continuity) for r in headings[DEGREES:]] for h in headings], np.uint32
        ),
        disc=_disc(margin),
        neighbours=_steps(starts, parameters.seed_distance, size, round),
        markers=_markers(parameters.marker_radius),
    )


def marker_reach(markers: np.ndarray) -> int:
    """How many pixels the picture of a marker, or of a paddle, extends beyond its middle."""
    return markers.shape[-1] // 2


def _reverse(angle: float) -> float:
    return angle + math.pi if angle < 0 else angle - math.pi


def _steps(angles: list[float], distance: int, size: int, whole: Callable[[float], int] = math.ceil) -> np.ndarray:
    """int8 (angles, size, 2): what ``distance`` at each angle adds to y and to x, by their value."""
    parts = [[distance * math.sin(angle), distance * math.cos(angle)] for angle in angles]
    return np.array([[[whole(c + part) - c for part in pair] for c in range(size)] for pair in parts], np.int8)


def _ring(radius: int) -> list[tuple[int, int]]:
    """Pixels on a circle that is sampled at every pixel of its arc, without repeats."""
    angles = [i / radius for i in range(math.ceil(2 * math.pi * radius))]
    return sorted({(math.floor(radius * math.sin(a)), math.floor(radius * math.cos(a))) for a in angles})


def _weight(heading: float, angle: float, continuity: float) -> int:
    turn = abs(heading - angle)
    return round(UNIT * math.cos(min(continuity * min(turn, 2 * math.pi - turn), math.pi / 2)) ** 2)


def _disc(radius: float) -> np.ndarray:
    """int32 (N, 2): pixels within ``radius`` of the origin."""
    y, x = np.mgrid[-int(radius) : int(radius) + 1, -int(radius) : int(radius) + 1]
    return np.stack([part[y**2 + x**2 <= radius**2] for part in (y, x)], axis=1).astype(np.int32)


def _dilate(image: np.ndarray, radius: int) -> np.ndarray:
    """The most of ``image`` (Y, X) within ``radius`` of each pixel."""
    out = np.zeros_like(image)
    around = np.pad(image, radius)
    for y, x in _disc(radius) + radius:
        np.maximum(out, around[y : y + image.shape[0], x : x + image.shape[1]], out=out)
    return out


def _footprint(area: np.ndarray, reach: int) -> np.ndarray:
    """int32 (F, 2): where ``area`` is fully covered, one pixel down and right of the start as in the public generator.

    None if at some corner of the image all of them would lie outside: the public generator's dilation has no value
    there and it then finds no room anywhere. With paddles as short as at 32 pixels that rules out most directions.
    """
    offsets = np.argwhere(area == 255).astype(np.int32) - marker_reach(area) + 1
    offsets = offsets[(np.abs(offsets) <= reach).all(axis=1)]
    corners = [(down, right) for down in (-1, 1) for right in (-1, 1)]
    return offsets if all((offsets * corner >= 0).all(axis=1).any() for corner in corners) else offsets[:0]


def _paddle(parameters: Parameters, margin: int, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (P, P) twice: the line and the area of a paddle that leaves the middle at ``angle``."""
    reach = parameters.reach(margin)
    middle, side = reach * ANTIALIAS, 2 * reach * ANTIALIAS + 1
    length = parameters.paddle_length * ANTIALIAS
    end = (math.ceil(middle + length * math.sin(angle)), math.ceil(middle + length * math.cos(angle)))
    large = draw_line(side, (middle, middle), end, round(parameters.paddle_thickness * ANTIALIAS))
    area = _dilate(large, margin * ANTIALIAS)
    small = 2 * reach + 1
    return scale_down(large, small), scale_down(area, small)


def _markers(radius: float) -> np.ndarray:
    """uint8 (E, E, Q, Q): see ``Tables.markers``; classes count from one border up to the middle, then to the other."""
    # scaling rings over its lobes beyond the disc; a pixel that near to a border, in turn, weighs its taps differently
    reach = math.ceil(radius) + 2 * _LOBES
    classes = 2 * reach + 1
    matrix = coefficients(ANTIALIAS * classes, classes)
    places = np.arange(classes)
    grid = np.arange(ANTIALIAS * classes)
    squares = (grid - ANTIALIAS * places[:, None]) ** 2
    inside = squares[:, None, :, None] + squares[None, :, None, :] <= (radius * ANTIALIAS) ** 2
    pictures = _resample(_resample(inside * 255.0, matrix.T), matrix.T, axis=-2)
    padded = np.pad(pictures, ((0, 0), (0, 0), (reach, reach), (reach, reach))).astype(np.uint8)
    out = np.empty((classes, classes, classes, classes), np.uint8)
    for y in places:
        for x in places:
            out[y, x] = padded[y, x, y : y + classes, x : x + classes]
    return out


def draw_line(side: int, start: tuple[int, int], end: tuple[int, int], width: int) -> np.ndarray:
    """uint8 (side, side), 255 on a line of ``width`` pixels between two pixels, both included, else 0."""
    out = np.zeros((side, side), np.uint8)
    (y0, x0), (y1, x1) = start, end
    dy, dx = y1 - y0, x1 - x0
    if width == 1:
        steps = max(abs(dy), abs(dx), 1)
        for i in range(steps + 1):
            # halves are rounded away from the start
            y, x = ((2 * i * abs(d) + steps) // (2 * steps) for d in (dy, dx))
            out[y0 + (y if dy > 0 else -y), x0 + (x if dx > 0 else -x)] = 255
        return out
    # a parallelogram whose long sides are width - 1 apart, its corners whole pixels; even widths lean down and right
    less, more = (width - 1) // 2, width // 2
    norm = math.hypot(dy, dx)
    shifts = [
        (_round_down(more * dx / norm), -_round_down(less * dy / norm)),
        (-_round_down(less * dx / norm), _round_down(more * dy / norm)),
    ]
    corners = [(y + shifts[i][0], x + shifts[i][1]) for i, (y, x) in ((0, start), (0, end), (1, end), (1, start))]
    edges = list(zip(corners, corners[1:] + corners[:1]))
    for y in range(min(corners)[0], max(corners)[0] + 1):
        crossings: list[float] = []
        for (ya, xa), (yb, xb) in edges:
            if ya == yb == y:
                crossings += [xa, xb]
            elif min(ya, yb) <= y <= max(ya, yb) and ya != yb:
                crossings.append(xa + (y - ya) * (xb - xa) / (yb - ya))
        out[y, math.floor(min(crossings) + 0.5) : math.ceil(max(crossings) - 0.5) + 1] = 255
    return out


def _round_down(value: float) -> int:
    """To the nearest integer, halves towards zero."""
    return int(math.copysign(math.ceil(abs(value) - 0.5), value))


@cache
def coefficients(large: int, small: int) -> np.ndarray:
    """float64 (small, large): Lanczos resampling from ``large`` to ``small`` pixels, whole numbers of 2**-22."""
    scale = large / small
    out = np.zeros((small, large))
    for i in range(small):
        middle = (i + 0.5) * scale
        first = max(0, int(middle - _LOBES * scale + 0.5))
        last = min(large, int(middle + _LOBES * scale + 0.5))
        taps = [_lanczos((j + 0.5 - middle) / scale) for j in range(first, last)]
        unit = 1 / sum(taps)
        out[i, first:last] = [_round_half_away(unit * tap * 2**_COEFFICIENT_BITS) for tap in taps]
    return out


def _lanczos(x: float) -> float:
    if abs(x) >= _LOBES:
        return 0.0
    if x == 0:
        return 1.0
    return _LOBES * math.sin(math.pi * x) * math.sin(math.pi * x / _LOBES) / (math.pi * x) ** 2


def _round_half_away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def scale_down(image: np.ndarray, side: int) -> np.ndarray:
    """uint8 (side, side) from a larger square image: Lanczos along x, rounded to 8 bits, then along y."""
    matrix = coefficients(len(image), side).T
    return _resample(_resample(image.astype(float), matrix), matrix, axis=-2).astype(np.uint8)


def _resample(image: np.ndarray, matrix: np.ndarray, axis: int = -1) -> np.ndarray:
    """float64, whole numbers 0..255: ``image (..., Y, X)`` times ``matrix`` along ``axis``."""
    # products and sums of whole numbers below 2**53 are exact in any order
    total = image @ matrix if axis == -1 else matrix.T @ image
    return np.clip(np.floor(total / 2**_COEFFICIENT_BITS + 0.5), 0, 255)
