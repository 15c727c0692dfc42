"""Pathfinder images in bulk: image ``index`` of a seed is the same whatever else is generated, how and by how many.

Two kernels give the same bytes: ``cpp`` (``csrc/pathfinder.cpp``, built on first use) and ``python``
(``pathfinder_growth``), which is some hundred times slower and runs, with a warning, where there is no compiler.

Shapes: N images, S height and width, C paddles of a long contour. Coordinates are (y, x).
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attention import cxx
from lra.errors import UserError
from lra.tasks import pathfinder_growth as growth
from lra.tasks.pathfinder_parameters import CONTOUR_LENGTHS, Parameters, parameters
from lra.tasks.pathfinder_sprites import Tables, tables

__all__ = ["CONTOUR_LENGTHS", "KERNELS", "Parameters", "Samples", "available", "generate", "parameters", "stream"]

KERNELS = ("auto", "cpp", "python")
SOURCE = Path(__file__).parent / "csrc" / "pathfinder.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17")
TASKS_PER_WORKER = 8
"""Threads share the images in this many parts each, so that none waits long for the last."""

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
    samples = _empty(parameters, count)
    choices = [tables(parameters, margin) for margin in parameters.paddle_margins]
    if _chosen(kernel) == "cpp":
        made = _compiled(parameters, choices, seed, start, samples, workers or len(os.sched_getaffinity(0)))
        samples.margins[:] = np.array(parameters.paddle_margins, np.uint8)[samples.margins[:]]
    else:
        made = _plain(parameters, choices, seed, start, samples)
    if made < count:
        raise UserError(
            f"Pathfinder image {start + made} of seed {seed}: two contours of {parameters.contour_length} paddles found "
            f"no room in {parameters.size}x{parameters.size} pixels after {growth.MOST_ATTEMPTS} attempts; "
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
    return {"cpp": _missing(), "python": None}


def _chosen(kernel: str) -> str:
    if kernel not in KERNELS:
        raise UserError(f"kernel {kernel!r} of the Pathfinder generator is unknown; choose one of {', '.join(KERNELS)}")
    if kernel == "python":
        return kernel
    missing = _missing()
    if missing and kernel == "cpp":
        raise UserError(f"kernel 'cpp' of the Pathfinder generator cannot run: {missing}")
    if missing:
        _warn(missing)
    return "python" if missing else "cpp"


@cache
def _warn(missing: str) -> None:
    log.warning("Pathfinder images come from the plain Python generator, some hundred times slower: %s", missing)


@cache
def _missing() -> str | None:
    return cxx.load(SOURCE, _load, flags=FLAGS, instead="the plain Python generator runs instead")


_library: list[ctypes.CDLL] = []


def _load(path: str) -> None:
    library = ctypes.CDLL(path)
    library.lra_pathfinder.restype = ctypes.c_int64
    library.lra_pathfinder.argtypes = [
        ctypes.POINTER(_Parameters),
        ctypes.POINTER(_Tables),
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
        _Samples,
    ]
    _library[:] = [library]


class _Tables(ctypes.Structure):
    """``Tables`` of the C++ source."""

    _fields_ = [(name, ctypes.c_void_p) for name in Tables._fields] + [
        (name, ctypes.c_int32) for name in ("picture", "ring_count", "disc_count", "marker")
    ]


class _Parameters(ctypes.Structure):
    """``Parameters`` of the C++ source."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("size", "padding", "seed_distance"),
            *("contour_length", "distractor_length", "distractors", "paddle_retrials", "distractor_retrials"),
            *("contour_level", "distractor_level", "marker_level"),
            *("claimed", "free", "collision", "dead_end", "crowded", "most_attempts", "choices"),
        )
    ]


class _Samples(ctypes.Structure):
    """``Samples`` of the C++ source; it writes the index of the margin in place of the margin."""

    _fields_ = [(name, ctypes.c_void_p) for name in Samples._fields]


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


def _compiled(p: Parameters, choices: list[Tables], seed: int, start: int, samples: Samples, workers: int) -> int:
    """Fill ``samples`` with the C++ kernel; returns how many images were made before the first that was not."""
    count = len(samples.labels)
    settings = _Parameters(
        *(p.size, p.padding, p.seed_distance),
        *(p.contour_length, p.distractor_length, p.distractors, p.paddle_retrials, p.distractor_retrials),
        *p.levels,
        *(growth.CLAIMED, growth.FREE, growth.COLLISION, growth.DEAD_END, growth.CROWDED, growth.MOST_ATTEMPTS),
        len(choices),
    )
    pointers = (_Tables * len(choices))(
        *(
            _Tables(*(a.ctypes.data for a in t), t.lines.shape[-1], len(t.ring), len(t.disc), t.markers.shape[-1])
            for t in choices
        )
    )
    step = max(1, -(-count // (workers * TASKS_PER_WORKER)))

    def part(first: int) -> int:
        """The images of one call, in which the interpreter is free for the other threads."""
        size = min(step, count - first)
        out = _Samples(*(array[first:].ctypes.data for array in samples))
        return first + _library[0].lra_pathfinder(settings, pointers, seed, start + first, size, out)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        firsts = range(0, count, step)
        ends = list(pool.map(part, firsts))
    return next((end for first, end in zip(firsts, ends) if end < min(first + step, count)), count)
