"""Proof of Pathfinder labels from recorded geometry, without any of the code that grew it.

Shapes: N images, S height and width, C paddles of a long contour. Coordinates are (y, x).
"""

import math

import numpy as np

from lra.tasks.pathfinder_generator import Samples
from lra.tasks.pathfinder_parameters import Parameters

LENGTH_SLACK = 1.5
"""Both ends of a paddle are whole pixels, so its length is off by no more than this."""
GAP_SLACK = 2 * math.sqrt(2)
"""A gap comes from a rounded pivot and two rounded ends: less than two pixels along y and along x."""
BRIGHT, LIT = 200, 64
"""Least intensity in the middle of a marker, and somewhere on a paddle."""


def connected(paddles: np.ndarray, markers: np.ndarray) -> np.ndarray:
    """int8 (N,): 1 if the two markers are on the two ends of one contour, 0 on ends of two; -1 if not on ends.

    ``paddles`` (N, 2, C, 4) and ``markers`` (N, 2, 2) as in ``Samples``; which marker is on which end does not matter.
    """
    ends = np.stack([paddles[:, :, 0, :2], paddles[:, :, -1, 2:]], axis=2)
    # (N, marker, contour, end): which ends each marker is on
    on = (markers[:, :, None, None] == ends[:, None]).all(axis=-1)
    contour = on.any(axis=3).argmax(axis=2)
    elsewhere = (on.sum(axis=(2, 3)) != 1).any(axis=1) | (on.sum(axis=1) > 1).any(axis=(1, 2))
    return np.where(elsewhere, -1, contour[:, 0] == contour[:, 1]).astype(np.int8)


def problems(parameters: Parameters, samples: Samples) -> list[str]:
    """One line for each way in which images, geometry and labels disagree; empty if all is well."""
    image = np.arange(len(samples.labels))
    paddles = samples.paddles.astype(np.int64)
    starts, ends = paddles[..., :2], paddles[..., 2:]
    gaps = np.linalg.norm(starts[:, :, 1:] - ends[:, :, :-1], axis=-1)
    lengths = np.linalg.norm(ends - starts, axis=-1)
    inside = (paddles.min(axis=(1, 2, 3)) >= 0) & (paddles.max(axis=(1, 2, 3)) < parameters.size)
    checks = {
        "all paddles inside": inside,
        f"paddles of length {parameters.paddle_length}": (
            np.abs(lengths - parameters.paddle_length) <= LENGTH_SLACK
        ).all(axis=(1, 2)),
        "gaps of twice the margin": (gaps <= 2 * samples.margins[:, None, None] + GAP_SLACK).all(axis=(1, 2)),
        "the label to tell whether both markers are on one contour": (
            connected(samples.paddles, samples.markers) == samples.labels
        ),
        "intensities from 0 to 255": (samples.images.min(axis=(1, 2)) == 0) & (samples.images.max(axis=(1, 2)) == 255),
    }
    # what lies outside cannot be looked up; it is reported as such
    safe = np.clip(paddles, 0, parameters.size - 1)
    points = np.stack([safe[..., :2], safe[..., 2:], (safe[..., :2] + safe[..., 2:]) // 2])
    lit = samples.images[image[:, None, None], points[..., 0], points[..., 1]].max(axis=0)
    checks["all paddles visible"] = (lit >= LIT).all(axis=(1, 2))
    at = np.clip(samples.markers.astype(np.int64), 0, parameters.size - 1)
    checks["both markers visible"] = (samples.images[image[:, None], at[..., 0], at[..., 1]] >= BRIGHT).all(axis=1)
    facts = {expected: np.flatnonzero(~fine) for expected, fine in checks.items()}
    return [
        f"expected {expected}, found otherwise in {len(wrong)} of {len(image)} images, first in {wrong[0]}"
        for expected, wrong in facts.items()
        if len(wrong)
    ]
