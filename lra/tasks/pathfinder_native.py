"""The compiled kernel of the Pathfinder generator: ``csrc/pathfinder.cpp`` behind ctypes."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from attention import cxx
from lra.tasks import pathfinder_growth as growth
from lra.tasks.pathfinder_parameters import Parameters
from lra.tasks.pathfinder_sprites import DEGREES, Tables

SOURCE = Path(__file__).parent / "csrc" / "pathfinder.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17")
PARTS_PER_WORKER = 4
"""Threads share the images in this many parts each, so that none waits long for the last."""
LARGEST_SIZE, LARGEST_PICTURE = 256, 32
"""Of an image and of a paddle with its surroundings, in pixels: what rows of the kernel's planes hold."""


@cache
def missing() -> str | None:
    """Build and load the kernel; why that is impossible here and what to install, or None when it worked."""
    return cxx.load(SOURCE, _load, flags=FLAGS, instead="the plain Python generator runs instead")


def refuses(parameters: Parameters) -> str | None:
    """Why the kernel cannot make images of ``parameters``, or None."""
    if parameters.size > LARGEST_SIZE:
        return f"size={parameters.size} is more than {LARGEST_SIZE}"
    side = 2 * (parameters.reach(max(parameters.paddle_margins)) + max(parameters.paddle_margins)) + 1
    if side > LARGEST_PICTURE:
        return f"a paddle with twice its margin takes {side} pixels, more than {LARGEST_PICTURE}"
    return None


def fill(
    parameters: Parameters, choices: list[Tables], seed: int, start: int, samples: tuple[np.ndarray, ...], workers: int
) -> int:
    """Fill ``samples`` on ``workers`` threads; returns how many images were made before the first that was not."""
    count = len(samples[0])
    settings, tables = _settings(parameters, len(choices)), (_Tables * len(choices))(*map(_pointers, choices))
    step = max(1, -(-count // (workers * PARTS_PER_WORKER)))

    def part(first: int) -> int:
        """The images of one call, in which the interpreter is free for the other threads; returns where it ended."""
        out = _Samples(*(array[first:].ctypes.data for array in samples))
        size = min(step, count - first)
        return first + _library[0].lra_pathfinder(settings, tables, seed, start + first, size, out)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        firsts = range(0, count, step)
        ends = list(pool.map(part, firsts))
    return next((end for first, end in zip(firsts, ends) if end < min(first + step, count)), count)


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
    """``Tables`` of the C++ source: arrays of ``pathfinder_sprites.Tables``, then sizes."""

    arrays = tuple(name for name in Tables._fields if name != "disc")
    _fields_ = [(name, ctypes.c_void_p) for name in arrays] + [
        (name, ctypes.c_int32) for name in ("directions", "picture", "surrounding", "ring_count", "marker")
    ]


def _pointers(tables: Tables) -> _Tables:
    arrays = [getattr(tables, name).ctypes.data for name in _Tables.arrays]
    sides = [pictures.shape[-1] for pictures in (tables.areas, tables.surroundings)]
    return _Tables(*arrays, DEGREES + len(tables.ring), *sides, len(tables.ring), tables.markers.shape[-1])


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


def _settings(p: Parameters, choices: int) -> _Parameters:
    return _Parameters(
        *(p.size, p.padding, p.seed_distance),
        *(p.contour_length, p.distractor_length, p.distractors, p.paddle_retrials, p.distractor_retrials),
        *p.levels,
        *(growth.CLAIMED, growth.FREE, growth.COLLISION, growth.DEAD_END, growth.CROWDED, growth.MOST_ATTEMPTS),
        choices,
    )


class _Samples(ctypes.Structure):
    """``Samples`` of the C++ source: arrays of ``pathfinder_generator.Samples``, the index of the margin for it."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("images", "labels", "choices", "paddles", "markers", "distractors")
    ]
