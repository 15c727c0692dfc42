"""Pathfinder images in bulk: image ``index`` of a seed is the same whatever else is generated, how and by how many.

Two kernels give the same bytes: ``cpp`` (``csrc/pathfinder.cpp``, built on first use) and ``python``
(``pathfinder_growth``), which is some hundred times slower and runs, with a warning, where there is no compiler.

Shapes: N images, S height and width, C paddles of a long contour. Coordinates are (y, x).
"""

import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from lra.errors import UserError
from lra.tasks import pathfinder_growth as growth
from lra.tasks import pathfinder_native as native
from lra.tasks.pathfinder_parameters import CONTOUR_LENGTHS, Parameters, parameters
from lra.tasks.pathfinder_sprites import Tables, tables

__all__ = ["CONTOUR_LENGTHS", "KERNELS", "Parameters", "Samples", "available", "generate", "parameters", "stream"]

KERNELS = ("auto", "cpp", "python")

log = logging.getLogger(__name__)


class Samples(NamedTuple):
    """N images, and the geometry that proves their labels; see ``pathfinder_check``."""

    images: np.ndarray
    """uint8 (N, S, S); every image spans 0..255."""
    labels: np.ndarray
    """uint8 (N,): 1 if both markers lie on one contour, else 0."""
    margins: np.ndarray
    """uint8 (N,): clear width around the paddles."""
    paddles: np.ndarray
    """int16 (N, 2, C, 4): the long contours from start to end, of each paddle its first end, then its second."""
    markers: np.ndarray
    """int16 (N, 2, 2): the marker on a start, then the one on an end."""
    distractors: np.ndarray
    """int16 (N,): how many found room."""


def generate(
    parameters: Parameters,
    seed: int,
    start: int,
    count: int,
    *,
    workers: int | None = None,
    kernel: str = "auto",
) -> Samples:
    """Images ``start`` to ``start + count - 1`` of ``seed``.

    ``workers`` threads (None: one a core) share the work of ``cpp``; ``python`` uses one. ``UserError`` if a kernel
    is unknown or cannot run, or if an image finds no room for its two contours.
    """
    if min(seed, start, count) < 0 or max(seed, start + count) >= 2**63:
        raise UserError(f"seed={seed}, images {start}..{start + count}: expected numbers from 0 to 2**63 - 1")
    chosen = _chosen(kernel, parameters)
    samples = _empty(parameters, count)
    choices = [tables(parameters, margin) for margin in parameters.paddle_margins]
    if chosen == "cpp":
        made = native.fill(parameters, choices, seed, start, samples, workers or _cores())
        samples.margins[:made] = np.array(parameters.paddle_margins, np.uint8)[samples.margins[:made]]
    else:
        made = _plain(parameters, choices, seed, start, samples)
    if made < count:
        raise UserError(
            f"Pathfinder image {start + made} of seed {seed}: two contours of {parameters.contour_length} paddles "
            f"found no room in {parameters.size}x{parameters.size} pixels after {growth.MOST_ATTEMPTS} attempts; "
            f"make the contours shorter, seed_distance smaller or the image larger"
        )
    return samples


def stream(
    parameters: Parameters,
    seed: int,
    start: int,
    stop: int,
    *,
    chunk: int = 1000,
    workers: int | None = None,
    kernel: str = "auto",
) -> Iterator[Samples]:
    """Images ``start`` to ``stop - 1`` of ``seed`` in order, ``chunk`` at a time: bounded memory, and any ``start``."""
    for first in range(start, stop, chunk):
        yield generate(parameters, seed, first, min(chunk, stop - first), workers=workers, kernel=kernel)


def available() -> dict[str, str | None]:
    """The kernels, with None or why one cannot run here."""
    return {"cpp": native.missing(), "python": None}


def _chosen(kernel: str, parameters: Parameters) -> str:
    if kernel not in KERNELS:
        raise UserError(f"kernel {kernel!r} of the Pathfinder generator is unknown; choose one of {', '.join(KERNELS)}")
    if kernel == "python":
        return kernel
    missing = native.missing() or native.refuses(parameters)
    if missing and kernel == "cpp":
        raise UserError(f"kernel 'cpp' of the Pathfinder generator cannot run: {missing}")
    if missing:
        _warn(missing)
    return "python" if missing else "cpp"


@cache
def _warn(missing: str) -> None:
    log.warning("Pathfinder images come from the plain Python generator, some hundred times slower: %s", missing)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _empty(parameters: Parameters, count: int) -> Samples:
    return Samples(
        images=np.empty((count, parameters.size, parameters.size), np.uint8),
        labels=np.empty(count, np.uint8),
        margins=np.empty(count, np.uint8),
        paddles=np.empty((count, 2, parameters.contour_length, 4), np.int16),
        markers=np.empty((count, 2, 2), np.int16),
        distractors=np.empty(count, np.int16),
    )


def _plain(p: Parameters, choices: list[Tables], seed: int, start: int, samples: Samples) -> int:
    """Fill ``samples`` with the Python kernel; returns how many images were made."""
    for i in range(len(samples.labels)):
        image = growth.grow(p, choices, seed, start + i)
        if image is None:
            return i
        for array, value in zip(samples, image, strict=True):
            array[i] = value
    return len(samples.labels)
