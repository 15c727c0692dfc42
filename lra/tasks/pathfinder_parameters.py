"""What Pathfinder images are made of, by image size.

Sources: [LRA] the parameters that Long Range Arena documents beside its builder of the data set
(``lra_benchmarks/data/pathfinder.py``, one docstring a size); [PFG] the defaults of the public generator of Linsley et
al. (NeurIPS 2018, arXiv 1805.08315), for what [LRA] leaves out; [ours] a choice of this project.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from lra.errors import UserError

CONTOUR_LENGTHS = {"hard": 14, "intermediate": 9, "easy": 6}
"""Paddles a contour in the three sets of a size; Long Range Arena scores ``hard`` [LRA]."""

ANTIALIAS = 2
"""Everything is drawn this many times larger, then scaled down [LRA]."""


@dataclass(frozen=True)
class Parameters:
    """Two long contours of paddles, shorter distractors, and a marker on an end of a long contour, twice.

    Lengths are in pixels, contrasts relative to that of a marker.
    """

    size: int
    """Height and width of the image."""
    contour_length: int
    """Paddles of each of the two long contours."""
    distractor_length: int
    """Paddles of a distractor."""
    distractors: int
    """Distractors aimed at; one that finds no room after all retrials is left out."""
    paddle_length: int
    paddle_thickness: float
    paddle_margins: tuple[int, ...]
    """Clear width around a paddle; one of these an image, each as likely."""
    seed_distance: int
    """Between the first ends of the two long contours, and half the width of the border where no contour starts."""
    marker_radius: float
    continuity: float
    """Larger is straighter: the next paddle turns by angle a with weight cos^2(min(continuity a, pi/2))."""
    snake_contrast: float
    """Contrast of the paddles of distractors; long contours have this times ``paddle_contrast``."""
    paddle_contrast: float
    padding: int
    """Width of the border that no paddle may touch."""
    paddle_retrials: int = 2
    """Further draws of a paddle that had no room [PFG]."""
    distractor_retrials: int = 4
    """Further attempts at a distractor that had no room [PFG]."""

    @cached_property
    def levels(self) -> tuple[int, int, int]:
        """Contrast of a long contour, a distractor and a marker in hundredths: images are sums of integers."""
        return round(100 * self.snake_contrast * self.paddle_contrast), round(100 * self.snake_contrast), 100

    def reach(self, margin: int) -> int:
        """How far the picture of a paddle extends from its middle."""
        return self.paddle_length + math.ceil(self.paddle_thickness) + margin


# [LRA] gives distractor_length as contour_length / 3 and the number of distractors as a constant / distractor_length.
# The generator is of Python 2's time, so both are integer divisions. [LRA] names paddle_contrast and, but for 32,
# paddle_length not at all: 1 and 5 are [PFG]. 256 has padding and seed_distance from [PFG] too.
_PADDLES = {32: 20, 64: 22, 128: 35, 256: 30}
_LRA = {
    32: dict(
        paddle_length=2,
        paddle_thickness=0.5,
        paddle_margins=(1,),
        seed_distance=7,
        marker_radius=1.5,
        continuity=1.0,
        snake_contrast=2.0,
        paddle_contrast=0.75,
        padding=1,
    ),
    64: dict(
        paddle_length=5,
        paddle_thickness=1.0,
        paddle_margins=(1,),
        seed_distance=12,
        marker_radius=2.5,
        continuity=1.8,
        snake_contrast=0.8,
        paddle_contrast=1.0,
        padding=1,
    ),
    128: dict(
        paddle_length=5,
        paddle_thickness=1.5,
        paddle_margins=(2, 3),
        seed_distance=20,
        marker_radius=3.0,
        continuity=1.8,
        snake_contrast=0.9,
        paddle_contrast=1.0,
        padding=1,
    ),
    256: dict(
        paddle_length=5,
        paddle_thickness=2.0,
        paddle_margins=(3,),
        seed_distance=27,
        marker_radius=5.0,
        continuity=1.8,
        snake_contrast=1.0,
        paddle_contrast=1.0,
        padding=22,
    ),
}
# 16 is [ours]: the paddles and contrasts of 32, and of everything else as much as finds room on a quarter of the area.
_SHORT = dict(contour_length=5, distractor_length=2, distractors=2, seed_distance=3, marker_radius=1.0)


def parameters(size: int, difficulty: str = "hard") -> Parameters:
    """Those of images of ``size`` pixels a side; ``UserError`` names the sizes and difficulties there are.

    All but 16 are Long Range Arena's. 16 has one difficulty.
    """
    if difficulty not in CONTOUR_LENGTHS:
        raise UserError(f"Pathfinder difficulty {difficulty!r} is unknown; choose one of {', '.join(CONTOUR_LENGTHS)}")
    if size == 16 and difficulty == "hard":
        return Parameters(size=16, **(_LRA[32] | _SHORT))
    if size not in _LRA:
        raise UserError(
            f"Pathfinder images of size {size}, {difficulty}, are not defined; "
            f"choose size 16 (hard only), {', '.join(map(str, _LRA))}"
        )
    contour = CONTOUR_LENGTHS[difficulty]
    distractor = contour // 3
    return Parameters(
        size=size,
        contour_length=contour,
        distractor_length=distractor,
        distractors=_PADDLES[size] // distractor,
        **_LRA[size],
    )
