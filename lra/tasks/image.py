"""Image: the class of a CIFAR-10 picture from its gray levels, one pixel a token, row after row.

A black pixel is a token like any other: padding is known from lengths, and no id stands for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import sources, splits, subset
from lra.data.arrays import Split, Writer
from lra.errors import UserError
from lra.tasks.base import TaskConfig
from lra.tasks.image_pixels import GRAY, LEVELS, SIDE, BadPicture, again, decode, resample
from lra.tasks.prepared import Disproved, PreparedTask, Progress

REPO, REVISION = "uoft-cs/cifar10", "0b2714987fa478483af9968de7c934580d0bb9a2"
SHA256 = (
    "8428b53a88a11ac374111006708df51469e315a22ac6d66470afd9c78d2ae883",
    "841389e6f2d64f28bf17310e430aebac20ec3ba611a3c5e231dc93c645ce84de",
)
"""Of the Hub's files of train and test at that revision."""
COLUMNS = {"img": "image", "label": "label"}
ROWS = {"train": 50_000, "test": 10_000}
"""What the Hub has; a folder that is named may have others."""
FEWEST = {"train": 10, "test": 1}
"""So many that no split is empty."""
NUM_CLASSES = 10
SIDES = {256: 16, 1024: 32, 4096: 64, 16_384: 128}
"""Pixels a side by length."""
S4_PIXELS = (122.6 / 255, 61.0 / 255)
"""Mean and deviation that s4 normalises by (state-spaces/s4, src/dataloaders/basic.py)."""
BATCH = 1000

VALIDATION = {
    "lra": "validation is our published choice, LRA's is another",
    "s4": "validation is the places that S4 drew, which it counted in torchvision's order and the Hub has another",
}


@dataclass
class Config(TaskConfig):
    """Which pictures."""

    name: str = "image"
    length: int = 1024
    """Pixels: 256, 1024, 4096 or 16384."""


class Image(PreparedTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "image"
    VERSION = "2"
    CITATION = "Krizhevsky, 2009 (CIFAR-10); Tay et al., ICLR 2021 (arXiv 2011.04006)"
    NUM_CLASSES = NUM_CLASSES
    KINDS = ("hub",)

    @classmethod
    def default_source(cls, config: Config, data_dir: Path) -> str:
        """LRA's release has no pictures: CIFAR-10 comes from the Hub or a mirror of it."""
        return "hub"

    @classmethod
    def fetch(cls, config: Config, data_dir: Path) -> None:
        """Download what is not on this machine."""
        _tables(config, data_dir)

    @classmethod
    def lacking(cls, config: Config, data_dir: Path) -> str | None:
        """A network is enough."""
        config = cls.resolved(config, data_dir)
        if config.source == "hub" and _locate(config, data_dir) is None:
            mirror = sources.mirrors(REPO, data_dir)[-1]
            return f"{REPO} from the Hugging Face Hub, or its train-*.parquet and test-*.parquet in {mirror}"
        return super().lacking(config, data_dir)

    @classmethod
    def source_files(cls, config: Config, data_dir: Path) -> dict[str, Path]:
        """The parquet files, if they are on this machine."""
        if _locate(config, data_dir) is None:
            return {}
        return {name: path for table in _tables(config, data_dir).values() for name, path in table.files.items()}

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        if config.length not in SIDES:
            lengths = ", ".join(f"{length} ({side} x {side})" for length, side in SIDES.items())
            raise UserError(f"task.length={config.length}: pictures are square; {cls.NAME} takes {lengths}")

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """The gray levels; none is padding."""
        return LEVELS

    @classmethod
    def pixels(cls, config: Config) -> tuple[float, float] | None:
        """s4's pixels are numbers, LRA's are ids."""
        return S4_PIXELS if config.fidelity == "s4" else None

    @classmethod
    def warnings(cls, config: Config, lengths: np.ndarray, details: dict[str, Any]) -> list[str]:
        """Length beyond the picture's own is not information; other pictures give other numbers."""
        side, found = SIDES[config.length], []
        if side > SIDE:
            found.append(
                f"CIFAR-10 pictures have {SIDE} x {SIDE} pixels: at {side} x {side} each is repeated "
                f"{(side // SIDE) ** 2} times, which makes rows longer and adds no information"
            )
        if not _is_published(details):
            found.append(f"the pictures are {details['exact']}")
        return found

    @classmethod
    def build(cls, config: Config, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Decode the pictures of all splits, then write those of each split in the order of the source."""
        published = _is_published(writer.details)
        writer.details["source"] = f"{REPO} in {_locate(config, data_dir)}"
        writer.details["exact"] = (
            f"the pictures of {REPO} at {REVISION[:12]}; {VALIDATION[config.fidelity]}"
            if published
            else f"not the files of {REPO} at {REVISION[:12]}: pixels, and the rows taken for validation, may be others"
        )
        gray: dict[str, list[np.ndarray]] = {}
        labels: dict[str, list[np.ndarray]] = {}
        tables = _tables(config, data_dir)
        rows = writer.details["rows"] = {name: table.rows for name, table in tables.items()}
        choice = _choice(config, rows)
        wanted = _wanted(choice)
        done = 0
        for name, table in tables.items():
            gray[name], labels[name] = [], []
            for rgb, batch in _pictures(name, table, wanted[name]):
                gray[name].append(GRAY[config.fidelity](rgb))
                labels[name].append(batch)
                done += len(rgb)
                progress(done, sum(map(len, wanted.values())))
        levels = {name: np.concatenate(parts) for name, parts in gray.items()}
        classes = {name: np.concatenate(parts) for name, parts in labels.items()}
        for split, (name, ids) in choice.items():
            places = np.searchsorted(wanted[name], ids)
            for part in np.split(places, range(BATCH, len(places), BATCH)):
                tokens = resample(levels[name][part], SIDES[config.length])
                writer.append(split, tokens.ravel(), np.full(len(part), config.length), classes[name][part])
        progress(done, done)

    @classmethod
    def prove(cls, config: Config, name: str, split: Split, details: dict[str, Any]) -> str:
        """Count rows and classes; pixels are proven by ``verify``."""
        expected = len(_choice(config, details["rows"])[name][1])
        if len(split) != expected:
            raise Disproved(f"{expected} rows in {name}", len(split))
        if (split.lengths != config.length).any():
            raise Disproved(f"{config.length} pixels in every row of {name}", split.lengths.min())
        low, high = split.labels.min(), split.labels.max()
        if low < 0 or high >= NUM_CLASSES:
            raise Disproved(f"labels 0..{NUM_CLASSES - 1} in {name}", f"{low}..{high}")
        counts = np.bincount(split.labels, minlength=NUM_CLASSES)
        return f"{counts.min()}..{counts.max()} rows a class"

    @classmethod
    def verify(cls, config: Config, data_dir: Path) -> list[str]:
        """What every task proves, and the pixels, decoded again where the source is on this machine."""
        facts = super().verify(config, data_dir)
        config = cls.resolved(config, data_dir)
        source = _locate(config, data_dir)
        if source is None or not source.is_dir():
            return [*facts, "the source is not on this machine: pixels not decoded again"]
        cls._check_copy(config, data_dir)
        try:
            return [*facts, _compare(config, source, data_dir, cls.load(config, data_dir)[1])]
        except Disproved as error:
            folder, command = cls.folder(config, data_dir), cls.identity(config, data_dir).command
            raise UserError(f"{folder}: {error}; delete or move it, then run `{command}`") from None


def _is_published(details: dict[str, Any]) -> bool:
    return set(details["source_files"].values()) == set(SHA256)


def _locate(config: Config, data_dir: Path) -> Path | None:
    return sources.locate(REPO, REVISION, source=config.source, data_dir=data_dir)


def _tables(config: Config, data_dir: Path) -> dict[str, sources.Table]:
    """Train and test of the source; ``UserError`` unless a copy of the Hub's has all rows, another enough."""
    tables = sources.load(REPO, REVISION, COLUMNS, source=config.source, data_dir=data_dir)
    for name, table in tables.items():
        if config.source == "hub" and table.rows != ROWS[name]:
            raise UserError(
                f"{table.root}: expected {ROWS[name]} rows in {name} as the Hub has, found {table.rows}; get the "
                f"files again, or name the folder to use it as it is: task.source={table.root}"
            )
        if table.rows < FEWEST[name]:
            raise UserError(f"{table.root}: expected {FEWEST[name]} rows or more in {name}, found {table.rows}")
    return tables


def _pictures(name: str, table: sources.Table, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pictures uint8 (R, S, S, 3) and labels (R,) of the rows ``wanted``, ascending ids of ``table``.

    ``UserError`` names a wrong row; the others are not decoded.
    """
    start = 0
    for batch in table.batches(BATCH):
        low, high = np.searchsorted(wanted, (start, start + len(batch["img"])))
        pictures, labels = [], []
        for row in wanted[low:high].tolist():
            data, label = batch["img"][row - start], batch["label"][row - start]
            try:
                if not 0 <= label < NUM_CLASSES:
                    raise BadPicture(f"expected a label 0..{NUM_CLASSES - 1}, found {label}")
                pictures.append(decode(data))
            except BadPicture as error:
                where = f"{table.paths[0].parent}: row {row} of {name}"
                raise UserError(f"{where}: {error}; get the files of {REPO} again") from None
            labels.append(label)
        if pictures:
            yield np.stack(pictures), np.array(labels)
        start += len(batch["img"])


def _choice(config: Config, rows: dict[str, int]) -> dict[str, tuple[str, np.ndarray]]:
    """For each split the part of the source, which has so many ``rows``, and the rows of it, ascending."""
    if config.fidelity == "s4":
        ids = splits.s4_ids("cifar10", rows["train"])
    elif rows["train"] == ROWS["train"]:
        ids = splits.load("cifar10")
    else:
        # the method of the published split, for other rows
        order = splits.ranked("cifar10", rows["train"])
        validation = len(order) // 10
        ids = {"validation": np.sort(order[:validation]), "train": np.sort(order[validation:])}
    ids["test"] = np.arange(rows["test"])
    choice = {}
    for split in ("train", "validation", "test"):
        key = f"{split}_rows"
        chosen = subset.choose(len(ids[split]), getattr(config, key), f"task.{key}")
        choice[split] = ("test" if split == "test" else "train", ids[split][chosen])
    return choice


def _wanted(choice: dict[str, tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """For each part of the source the rows that some split has, ascending."""
    parts = {part for part, _ in choice.values()}
    return {part: np.sort(np.concatenate([ids for of, ids in choice.values() if of == part])) for part in parts}


def _compare(config: Config, folder: Path, data_dir: Path, prepared: dict[str, Split]) -> str:
    """Decode the source again and hold every prepared row against it; a fact for people."""
    tables = _tables(config, data_dir)
    choice, side = _choice(config, {name: table.rows for name, table in tables.items()}), SIDES[config.length]
    wanted = _wanted(choice)
    for part, table in tables.items():
        start = 0
        for rgb, labels in _pictures(part, table, wanted[part]):
            of_batch = wanted[part][start : start + len(rgb)]
            for split, ids in ((split, ids) for split, (of, ids) in choice.items() if of == part):
                low, high = np.searchsorted(ids, (of_batch[0], of_batch[-1] + 1))
                if low == high:
                    continue
                rows = np.searchsorted(of_batch, ids[low:high])
                found = prepared[split].flat(low, high).reshape(-1, side, side)
                wrong = (found != again(rgb[rows], config.fidelity, side)).any((1, 2))
                wrong |= prepared[split].labels[low:high] != labels[rows]
                if wrong.any():
                    i = wrong.argmax()
                    raise Disproved(f"row {low + i} of {split} to be picture {ids[low + i]} of {part}", "another")
            start += len(rgb)
    count = sum(map(len, prepared.values()))
    return f"{count} pictures decoded again from {folder}, converted in another way: equal"
