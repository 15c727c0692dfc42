"""How a Pathfinder image grows, in plain numpy: the readable twin of ``csrc/pathfinder.cpp``, equal to it bit by bit.

The procedure is that of the public generator of Linsley et al. (NeurIPS 2018, arXiv 1805.08315). Two contours grow
in turn, paddle by paddle, from starts that are a fixed distance apart. A paddle begins behind the one before it and
ends at a pixel of a ring; straight on is likelier, and a pixel counts less the more others claim it. If a paddle
collides after all retrials, both contours start again. Distractors then grow one by one in what room is left. Markers
go to the start of one long contour and the end of one: the same for label 1, the other for label 0. One rule is ours:
the four ends are four pixels, which would else fail in about one of 400 images of 32 pixels.

Coordinates are (y, x). Shapes: S height and width, C contour length, K ring pixels.
"""

from typing import NamedTuple

import numpy as np

from lra.tasks.pathfinder_parameters import Parameters
from lra.tasks.pathfinder_sprites import DEGREES, UNIT, Tables, marker_reach

CLAIMED = 255
FREE = int(0.3 * CLAIMED)
"""A pixel claimed more than this is no start of a contour."""
COLLISION = int(1.8 * CLAIMED)
"""A paddle has no room where its own claim and that of others add up to this."""
DEAD_END = int(1e-4 * CLAIMED * UNIT)
"""A contour ends where the ring pixels weigh no more than this together."""
CROWDED = 100
"""No distractor starts when less than one pixel in this many is free."""
MOST_ATTEMPTS = 100_000
"""At two long contours. Long Range Arena's parameters take a few on average."""

_MASK = (1 << 64) - 1


class Random:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), started from a seed and the index of the image."""

    def __init__(self, seed: int, index: int) -> None:
        self._state = _mix(_mix(seed) ^ index)

    def below(self, bound: int) -> int:
        """Uniform in 0..bound - 1; what 2**32 is not a multiple of makes a difference below 2**-32 * bound."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return (_mix(self._state) >> 32) * bound >> 32


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Paddle(NamedTuple):
    """One that is drawn in a direction from a pixel; see ``Tables.lines``."""

    direction: int
    y: int
    x: int


class Image(NamedTuple):
    """What one index gives; see ``pathfinder_generator.Samples``. None where no two contours found room."""

    pixels: np.ndarray
    label: int
    margin: int
    paddles: np.ndarray
    markers: np.ndarray
    distractors: int


def grow(parameters: Parameters, choices: list[Tables], seed: int, index: int) -> Image | None:
    """Image ``index`` of ``seed``; ``choices`` are the tables of each of the parameters' margins."""
    random = Random(seed, index)
    label = random.below(2)
    choice = random.below(len(choices))
    growth = _Growth(parameters, choices[choice], random)
    for _ in range(MOST_ATTEMPTS):
        if contours := growth.two_contours():
            break
    else:
        return None
    distractors = []
    for _ in range(parameters.distractors):
        for _ in range(parameters.distractor_retrials + 1):
            if distractor := growth.distractor():
                distractors.append(distractor)
                break
    ends = [[growth.ends(paddle) for paddle in contour] for contour in contours]
    first = random.below(2)
    last = first if label else 1 - first
    markers = [ends[first][0][:2], ends[last][-1][2:]]
    pixels = growth.draw(contours, distractors, markers)
    margin = parameters.paddle_margins[choice]
    return Image(pixels, label, margin, np.array(ends), np.array(markers), len(distractors))


class _Growth:
    """The contours of one image. ``claims`` uint8 (S, S) says how much each pixel belongs to a paddle already."""

    def __init__(self, parameters: Parameters, tables: Tables, random: Random) -> None:
        self.p, self.t, self.random = parameters, tables, random
        self.claims = np.zeros(0, np.uint8)

    def two_contours(self) -> list[list[Paddle]] | None:
        """The two long contours; leaves their claims behind. None if one of them finds no room."""
        size, padding = self.p.size, self.p.padding
        self.claims = np.full((size, size), CLAIMED, np.uint8)
        self.claims[padding : size - padding, padding : size - padding] = 0
        first = self._start(2 * self.p.seed_distance)
        if first is None:
            return None
        second = self._start_beside(first)
        if second is None:
            return None
        contours = [[first], [second]]
        pivots = [self._first_pivot(first), self._first_pivot(second)]
        for _ in range(self.p.contour_length - 1):
            for i, contour in enumerate(contours):
                pivots[i] = self._extend(contour, pivots[i])
                if pivots[i] is None:
                    return None
        # unlike the public generator: where two of the four ends share a pixel, the label would have no meaning
        if len({paddle[1:] for contour in contours for paddle in (contour[0], contour[-1])}) < 4:
            return None
        # as in the public generator, the last paddle of the first contour claims nothing
        self._claim(contours[1][-1])
        return contours

    def distractor(self) -> list[Paddle] | None:
        """A short contour in the room that is left; if there is none, no claim remains and the answer is None."""
        before = self.claims.copy()
        first = self._start(1, -(-self.claims.size // CROWDED))
        if first is not None:
            contour, pivot = [first], self._first_pivot(first)
            while pivot is not None and len(contour) < self.p.distractor_length:
                pivot = self._extend(contour, pivot)
            if pivot is not None:
                self._claim(contour[-1])
                return contour
        self.claims = before
        return None

    def _start(self, border: int, fewest_free: int = 0) -> Paddle | None:
        """A contour's first paddle, uniform over where there is room and ``border`` pixels from the image's edge."""
        size = self.p.size
        for _ in range(self.p.paddle_retrials + 1):
            direction = self.random.below(DEGREES)
            footprint = self._footprint(direction)
            free = self.claims <= FREE
            if not len(footprint) or free.sum() < fewest_free:
                return None
            inner = np.zeros_like(free)
            inner[border : size - border, border : size - border] = True
            reach = marker_reach(self.t.lines) + 1
            # nothing beyond the edge is claimed
            around = np.pad(free & inner, reach, constant_values=True)
            room = np.ones_like(free)
            for y, x in footprint + reach:
                room &= around[y : y + size, x : x + size]
            places = np.flatnonzero(room)
            if not len(places):
                return None
            y, x = divmod(int(places[self.random.below(len(places))]), size)
            if self._fits_frame(paddle := Paddle(direction, y, x)):
                return paddle
        return None

    def _footprint(self, direction: int) -> np.ndarray:
        return self.t.footprint[self.t.footprint_starts[direction] : self.t.footprint_starts[direction + 1]]

    def _start_beside(self, other: Paddle) -> Paddle | None:
        """The first paddle of the second contour: anywhere at the right distance from the first, room or not."""
        for _ in range(self.p.paddle_retrials + 1):
            direction = self.random.below(DEGREES)
            y, x = self._move(self.t.neighbours[self.random.below(DEGREES)], other[1:])
            if self._fits_frame(paddle := Paddle(direction, y, x)):
                return paddle
        return None

    def _fits_frame(self, paddle: Paddle) -> bool:
        """Whether a contour's first paddle ends, and has its pivot, inside the image."""
        points = (*self._move(self.t.ends[paddle.direction], paddle[1:]), *self._first_pivot(paddle))
        return all(0 <= value < self.p.size for value in points)

    def _first_pivot(self, paddle: Paddle) -> tuple[int, int]:
        return self._move(self.t.pivots[paddle.direction], paddle[1:])

    def _move(self, steps: np.ndarray, place: tuple[int, int]) -> tuple[int, int]:
        """``place`` and the step of ``steps`` (S, 2) from there; from outside, that of the image's edge."""
        y, x = place
        at_y, at_x = (min(max(value, 0), self.p.size - 1) for value in place)
        return y + int(steps[at_y, 0]), x + int(steps[at_x, 1])

    def _extend(self, contour: list[Paddle], pivot: tuple[int, int]) -> tuple[int, int] | None:
        """Append a paddle to ``contour``, whose last one has ``pivot``, and return the new pivot; None if no room."""
        last = contour[-1]
        pivot = self._move(self.t.forward[last.direction], pivot)
        points = self.t.ring + pivot
        inside = ((points >= 0) & (points < self.p.size)).all(axis=1)
        # pulling what lies beyond the edge to it leaves no disc: the most claimed pixel within the margin is the same
        near = np.clip(points[:, None] + self.t.disc, 0, self.p.size - 1)
        free = CLAIMED - self.claims[near[..., 0], near[..., 1]].max(axis=1).astype(np.int64)
        weights = np.cumsum(free * inside * self.t.weights[last.direction])
        if weights[-1] <= DEAD_END:
            return None
        for _ in range(self.p.paddle_retrials + 1):
            k = int(np.searchsorted(weights, self.random.below(int(weights[-1])), side="right"))
            paddle = Paddle(DEGREES + k, *map(int, points[k]))
            mine, theirs = self._overlap(self.t.areas[paddle.direction], paddle.y, paddle.x, self.claims)
            if (mine.astype(np.int64) + theirs).max() < COLLISION:
                self._claim(last)
                contour.append(paddle)
                return pivot
        return None

    def _claim(self, paddle: Paddle) -> None:
        mine, claims = self._overlap(self.t.areas[paddle.direction], paddle.y, paddle.x, self.claims)
        np.maximum(claims, mine, out=claims)

    @staticmethod
    def _overlap(picture: np.ndarray, y: int, x: int, canvas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of ``picture``, its middle at (y, x), and of ``canvas`` that lie on each other, as views."""
        reach, (height, width) = marker_reach(picture), canvas.shape
        top, left = max(0, y - reach), max(0, x - reach)
        below, right = min(height, y + reach + 1), min(width, x + reach + 1)
        mine = picture[top - y + reach : below - y + reach, left - x + reach : right - x + reach]
        return mine, canvas[top:below, left:right]

    def ends(self, paddle: Paddle) -> tuple[int, int, int, int]:
        """y and x of the end that comes first along the contour, then of the other."""
        place, other = paddle[1:], self._move(self.t.ends[paddle.direction], paddle[1:])
        return (*place, *other) if paddle.direction < DEGREES else (*other, *place)

    def draw(self, contours: list[list[Paddle]], distractors: list[list[Paddle]], markers: list) -> np.ndarray:
        """uint8 (S, S): the brightest of all that lies on a pixel, stretched so that the image spans 0..255."""
        size = self.p.size
        canvas = np.zeros((size, size), np.int64)
        on_contour, on_distractor, on_marker = self.p.levels
        for level, group in ((on_contour, contours), (on_distractor, distractors)):
            for paddle in (paddle for contour in group for paddle in contour):
                mine, pixels = self._overlap(self.t.lines[paddle.direction], paddle.y, paddle.x, canvas)
                np.maximum(pixels, mine.astype(np.int64) * level, out=pixels)
        for y, x in markers:
            picture = self.t.markers[self._marker_class(y), self._marker_class(x)]
            mine, pixels = self._overlap(picture, y, x, canvas)
            np.maximum(pixels, mine.astype(np.int64) * on_marker, out=pixels)
        most = canvas.max()
        return ((2 * 255 * canvas + most) // (2 * most)).astype(np.uint8)

    def _marker_class(self, place: int) -> int:
        reach = marker_reach(self.t.markers)
        beyond = place - (self.p.size - reach)
        return min(place, reach) if beyond < 0 else reach + 1 + beyond
