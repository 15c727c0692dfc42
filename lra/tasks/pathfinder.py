"""Pathfinder: do the two markers lie on one contour? Images as sequences of pixels, row by row.

Images are generated with the published parameters, or read from LRA's release. ``pathx`` is the same at 128 pixels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import arrays, release
from lra.data.arrays import Split, Writer
from lra.data.subset import choose
from lra.errors import UserError
from lra.tasks import pathfinder_release
from lra.tasks.base import TaskConfig
from lra.tasks.pathfinder_check import problems
from lra.tasks.pathfinder_generator import CONTOUR_LENGTHS, Samples, parameters
from lra.tasks.pathfinder_shards import Shards
from lra.tasks.prepared import Disproved, PreparedTask, Progress

ROWS = {"train": 160_000, "validation": 20_000, "test": 20_000}
"""LRA's split sizes."""
FIRST = {"test": 0, "validation": 10**12, "train": 2 * 10**12}
"""Number of the first image of each split: apart, so that no split changes when another one grows."""
CHUNK_PIXELS = 2_000_000
MOST_FRUITLESS_CHUNKS = 20


@dataclass
class Config(TaskConfig):
    """Which images."""

    name: str = "pathfinder"
    length: int = 32 * 32
    """Pixels; the side of an image is its square root."""
    seed: int = 0
    """Of generated images; the seed of training is another."""
    difficulty: str = "hard"
    """``easy``, ``intermediate`` or ``hard``: contours of 6, 9 or 14 paddles. Published results are of ``hard``."""


class Pathfinder(PreparedTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "pathfinder"
    VERSION = "2"
    CITATION = "Linsley et al., NeurIPS 2018 (arXiv 1805.08315); Tay et al., ICLR 2021 (arXiv 2011.04006)"
    NUM_CLASSES = 2
    KINDS = ("generated", "release")
    SIDES = (16, 32, 64, 128)

    @classmethod
    def default_source(cls, config: Config, data_dir: Path) -> str:
        """LRA's images where they are, else generated ones."""
        return "release" if release.find(data_dir, pathfinder_release.folder_name(_side(config))) else "generated"

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        if config.length not in [side * side for side in cls.SIDES]:
            lengths = ", ".join(f"{side * side} ({side} x {side})" for side in cls.SIDES)
            raise UserError(f"task.length={config.length}: {cls.NAME} has images of {lengths} pixels; choose one")
        if config.difficulty not in CONTOUR_LENGTHS:
            raise UserError(f"task.difficulty={config.difficulty!r} is unknown; choose {' | '.join(CONTOUR_LENGTHS)}")
        if _side(config) == 16 and config.difficulty != "hard":
            raise UserError(f"task.difficulty={config.difficulty}: images of 16 x 16 have hard only")
        cls.check_ranges(config, seed=(0, 2**63 - 1))

    @classmethod
    def parameters(cls, config: Config) -> dict[str, int | float | str]:
        """The seed belongs to generated images only."""
        options = super().parameters(config)
        if config.source != "generated":
            del options["seed"]
        return options

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """Intensities; none of them is padding, as all images have the same length."""
        return 256

    @classmethod
    def pixels(cls, config: Config) -> tuple[float, float] | None:
        """S4 takes intensities as numbers in [0, 1], not centred."""
        return (0.0, 1.0) if config.fidelity == "s4" else None

    @classmethod
    def fetch(cls, config: Config, data_dir: Path) -> None:
        """Unpack the release's archive if that is the source."""
        if config.source != "generated":
            release.folder(config.source, pathfinder_release.folder_name(_side(config)), data_dir)

    @classmethod
    def source_files(cls, config: Config, data_dir: Path) -> dict[str, Path]:
        """The metadata, which has the labels."""
        if config.source == "generated":
            return {}
        return {f"metadata/{path.name}": path for path in pathfinder_release.metadata(_source(config, data_dir))}

    @classmethod
    def build(cls, config: Config, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Generate images or read LRA's."""
        if config.source == "generated":
            writer.details["source"] = f"generated with seed {config.seed}"
            writer.details["exact"] = (
                "distribution of the published generator; the released images cannot be made again"
                if _side(config) > 16
                else "ours: LRA has no images of 16 x 16"
            )
            with Shards(cls.folder(config, data_dir)) as shards:
                _generate(config, shards, writer, progress)
        else:
            source = _source(config, data_dir)
            writer.details["source"] = f"LRA's images in {source}"
            _read(config, source, writer, progress)

    @classmethod
    def prove(cls, config: Config, name: str, split: Split, details: dict[str, Any]) -> str:
        """Generated: the same images again, with the geometry that proves each label. Else: the source again."""
        if (split.sequence_lengths != config.length).any():
            raise Disproved(f"{config.length} pixels a row in {name}", "others")
        if config.source != "generated":
            return _compare(config, name, split, details)
        start = 0
        for samples in _samples(config, name, len(split), details["left_out"][name]):
            stop = start + len(samples.labels)
            if found := problems(parameters(_side(config), config.difficulty), samples):
                raise Disproved(f"the geometry of {name} to prove its labels", found[0])
            if not np.array_equal(samples.labels, split.labels[start:stop]):
                raise Disproved(f"labels of {name} from row {start} as the contours give them", "others")
            if not np.array_equal(samples.images.ravel(), split.flat(start, stop)):
                raise Disproved(f"images of {name} from row {start} as seed {config.seed} gives them", "others")
            start = stop
        return f"{len(split)} labels proven from the contours, images generated again and equal"


def _side(config: Config) -> int:
    return math.isqrt(config.length)


def _asked(config: Config, split: str) -> int:
    return getattr(config, f"{split}_rows") or ROWS[split]


def _samples(config: Config, split: str, rows: int, left_out: list[int]) -> Iterator[Samples]:
    """Generated images of a split in chunks of bounded size, without those numbered in ``left_out``."""
    from lra.tasks.pathfinder_generator import generate

    chunk = max(1, CHUNK_PIXELS // config.length)
    settings = parameters(_side(config), config.difficulty)
    numbers = rows + len(left_out)
    for start in range(0, numbers, chunk):
        samples = generate(settings, config.seed, FIRST[split] + start, min(chunk, numbers - start))
        kept = ~np.isin(np.arange(start, start + len(samples.labels)), left_out)
        yield Samples(*(array[kept] for array in samples))


def _generate(config: Config, shards: Shards, writer: Writer, progress: Progress) -> None:
    """Images in the order of their numbers, less those that came before: at 16 pixels about 1 in 25 of LRA's 200,000.

    Evaluation splits come first, so that they stay the same when only the number of training rows changes.
    """
    counts = {split: _asked(config, split) for split in FIRST}
    done, total = 0, sum(counts.values())
    chunk = max(1, CHUNK_PIXELS // config.length)
    settings = parameters(_side(config), config.difficulty)
    left_out: dict[str, list[int]] = {split: [] for split in FIRST}
    writer.details["left_out"] = left_out
    seen: set[bytes] = set()
    for split, rows in counts.items():
        start = fruitless = 0
        while rows and fruitless < MOST_FRUITLESS_CHUNKS:
            count = min(chunk, rows)
            images, labels = shards.get(settings, config.seed, FIRST[split] + start, count)
            new = _unseen(images, seen)
            left_out[split] += (start + np.flatnonzero(~new)).tolist()
            start += count
            fruitless = 0 if new.any() else fruitless + 1
            if not new.any():
                continue
            added = int(new.sum())
            writer.append(split, images[new].ravel(), np.full(added, config.length), labels[new].astype(np.int64))
            rows -= added
            done += added
            progress(done, total)
        if rows:
            raise UserError(
                f"task.length={config.length}, task.{split}_rows={counts[split]}: expected {total} different images, "
                f"found no more than {done}; ask for fewer rows or a larger length"
            )


def _unseen(images: np.ndarray, seen: set[bytes]) -> np.ndarray:
    """Which of ``images`` (N, S, S) are not in ``seen`` nor came before, bool (N,); adds them to ``seen``."""
    new = np.zeros(len(images), bool)
    pixels = images[0].size if len(images) else 1
    for i, key in enumerate(arrays.row_hashes(images.ravel(), np.full(len(images), pixels))):
        new[i] = key not in seen
        seen.add(key)
    return new


def _source(config: Config, data_dir: Path) -> Path:
    """The folder of one difficulty, with ``imgs`` and ``metadata``."""
    folder = release.folder(config.source, pathfinder_release.folder_name(_side(config)), data_dir, unpack=False)
    return pathfinder_release.difficulty_folder(folder, config.difficulty)


def _chosen(config: Config, records: list[pathfinder_release.Record]) -> dict[str, list[pathfinder_release.Record]]:
    """The records of each split: the published ids, as many as were asked for, of a picture named again the first."""
    found = {}
    first = {record.path: i for i, record in reversed(list(enumerate(records)))}
    for split, ids in pathfinder_release.split_ids(len(records), config.fidelity).items():
        kept = [records[i] for i in ids if first[records[i].path] == i and not records[i].known_bad]
        if not kept:
            place = records[0].path.parents[2]
            raise UserError(f"{place}: {len(records)} images leave none for {split}; get the whole set")
        rows = choose(len(kept), getattr(config, f"{split}_rows"), f"task.{split}_rows")
        found[split] = [kept[i] for i in rows]
    return found


def _read(config: Config, source: Path, writer: Writer, progress: Progress) -> None:
    records = pathfinder_release.records(source)
    published = len(records) == sum(ROWS.values())
    whose = "S4's" if config.fidelity == "s4" else "our published"
    writer.details["folder"] = str(source)
    writer.details["exact"] = (
        f"the released images with {whose} split ids"
        if published
        else f"{len(records):,} images, the release has {sum(ROWS.values()):,}; split 80/10/10 by {whose} rule"
    )
    if again := len(records) - len({record.path for record in records}):
        writer.details["exact"] += f"; {again:,} lines name a picture again and are left out"
    splits = _chosen(config, records)
    done, total = 0, sum(map(len, splits.values()))
    chunk = max(1, CHUNK_PIXELS // config.length)
    for split, chosen in splits.items():
        for start in range(0, len(chosen), chunk):
            part = chosen[start : start + chunk]
            images = pathfinder_release.images(part, _side(config))
            labels = np.array([record.label for record in part])
            writer.append(split, images.ravel(), np.full(len(part), config.length), labels)
            done += len(part)
            progress(done, total)


def _compare(config: Config, name: str, split: Split, details: dict[str, Any]) -> str:
    source = Path(details["folder"])
    if not source.is_dir():
        return f"{source} is gone, so that labels are only counted"
    chosen = _chosen(config, pathfinder_release.records(source))[name]
    if len(chosen) != len(split):
        raise Disproved(f"{len(chosen)} images of {source} in {name}", len(split))
    for i, record in enumerate(chosen):
        if record.label != split.labels[i]:
            raise Disproved(f"row {i} of {name} to have label {record.label} of {record.origin}", split.labels[i])
        if not np.array_equal(pathfinder_release.images([record], _side(config))[0].ravel(), split.row(i)):
            raise Disproved(f"row {i} of {name} to be {record.path}", "another image")
    return f"{len(split)} labels and images equal those of {source}"


@dataclass
class PathXConfig(Config):
    """Path-X: which images."""

    name: str = "pathx"
    length: int = 128 * 128


class PathX(Pathfinder):
    """Pathfinder at 128 pixels, Path-X of LRA; 64 and 256 by option. See ``lra.tasks.base.Task``."""

    Config = PathXConfig
    NAME = "pathx"
    SIDES = (64, 128, 256)
