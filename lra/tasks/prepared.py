"""What tasks have in common: rows are prepared once as arrays on disk, proven, and opened.

A task fills in where its rows come from and how a label is proven; the order of things is the same for all.
"""

import hashlib
import logging
import os
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lra.data import arrays
from lra.data.arrays import Identity, Layout, Split, Writer
from lra.errors import UserError
from lra.paths import absolute
from lra.tasks.base import FIDELITIES, TaskConfig, TaskInfo, length_statistics, majority_share

Progress = Callable[[int, int], None]
"""Called with rows done and rows in all."""
MOST_ROWS = 10**9
KINDS = ("generated", "release", "hub")
BLOCK_TOKENS = 2_000_000

log = logging.getLogger(__name__)


class Disproved(Exception):
    """A fact of the prepared rows that does not hold: what was expected and what was found."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {found}")


class PreparedTask(ABC):
    """A task whose rows are prepared once; see ``lra.tasks.base.Task`` for what the trainer asks of it."""

    Config: ClassVar[type[TaskConfig]]
    NAME: ClassVar[str]
    VERSION: ClassVar[str]
    CITATION: ClassVar[str]
    NUM_CLASSES: ClassVar[int]
    FIDELITIES: ClassVar[tuple[str, ...]] = FIDELITIES
    KINDS: ClassVar[tuple[str, ...]]
    """Which of ``KINDS`` the task has besides a folder that the user names."""
    TRUNCATES: ClassVar[bool] = False
    """Rows are what the source has, cut to ``length``; a longer ``length`` is then mostly padding."""

    # What a task fills in.

    @classmethod
    @abstractmethod
    def default_source(cls, config: TaskConfig, data_dir: Path) -> str:
        """What ``auto`` means: the first of release, Hub and generation that can serve ``config``."""

    @classmethod
    @abstractmethod
    def build(cls, config: TaskConfig, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Append the rows of every split to ``writer``; ``writer.details`` takes findings, and must be given
        ``source`` (where the rows are from) and ``exact`` (how near to the original they are), both for people.
        """

    @classmethod
    @abstractmethod
    def prove(cls, config: TaskConfig, name: str, split: Split, details: dict[str, Any]) -> str:
        """Prove the labels of split ``name`` in a way other than that which made them; a clause for people.

        Raises ``Disproved``.
        """

    @classmethod
    @abstractmethod
    def vocab_size(cls, config: TaskConfig, details: dict[str, Any]) -> int:
        """Number of token ids."""

    @classmethod
    def num_classes(cls, config: TaskConfig) -> int:
        """Number of labels; for a task whose options decide it, instead of ``NUM_CLASSES``."""
        return cls.NUM_CLASSES

    @classmethod
    def layout(cls, config: TaskConfig) -> Layout:
        """What a row is made of."""
        return Layout()

    @classmethod
    def pixels(cls, config: TaskConfig) -> tuple[float, float] | None:
        """See ``TaskInfo.pixels``."""
        return None

    @classmethod
    def parameters(cls, config: TaskConfig) -> dict[str, int | float | str]:
        """The options that decide which rows there are, in the order in which they name the folder."""
        return {f.name: getattr(config, f.name) for f in fields(config) if f.name != "name"}

    @classmethod  # noqa: B027  most tasks have nothing to download
    def fetch(cls, config: TaskConfig, data_dir: Path) -> None:
        """Bring the source to this machine where it must come from elsewhere; ``build`` finds it there."""

    @classmethod
    def lacking(cls, config: TaskConfig, data_dir: Path) -> str | None:
        """What ``prepare`` needs that is not on this machine, for people; None if all is there."""
        try:
            cls.source_files(cls.resolved(config, data_dir), data_dir)
        except UserError as error:
            return str(error)
        return None

    @classmethod
    def source_files(cls, config: TaskConfig, data_dir: Path) -> dict[str, Path]:
        """Files whose sha256 proves that the source is still the one that was read; none if generated."""
        return {}

    @classmethod
    def check(cls, config: TaskConfig) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met; a task adds its own checks."""
        if config.fidelity not in cls.FIDELITIES:
            raise UserError(f"task.fidelity={config.fidelity!r}: {cls.NAME} takes {' | '.join(cls.FIDELITIES)}")
        if not config.source:
            raise UserError(f"task.source= is empty; choose {' | '.join(('auto', *cls.KINDS))} or name a folder")
        if config.source in KINDS and config.source not in cls.KINDS:
            raise UserError(
                f"task.source={config.source}: {cls.NAME} takes {' | '.join(('auto', *cls.KINDS))} or a folder"
            )
        cls.check_ranges(config, train_rows=(0, MOST_ROWS), validation_rows=(0, MOST_ROWS), test_rows=(0, MOST_ROWS))

    @classmethod
    def check_ranges(cls, config: TaskConfig, **limits: tuple[int, int]) -> None:
        """Raise ``UserError`` if the option of a name in ``limits`` is not in its range, ends included."""
        for name, (low, high) in limits.items():
            value = getattr(config, name)
            if not low <= value <= high:
                raise UserError(f"task.{name}={value}: {cls.NAME} takes {low}..{high}; choose a number in that range")

    # What is the same for all.

    @classmethod
    def resolved(cls, config: TaskConfig, data_dir: Path) -> TaskConfig:
        """``config``, checked, with ``source`` one of ``KINDS`` or the absolute path of a folder or file."""
        cls.check(config)
        source = config.source
        if source == "auto":
            source = cls.default_source(config, Path(data_dir))
        elif source not in KINDS:
            source = str(absolute(source, "task.source"))
        return replace(config, source=source)

    @classmethod
    def folder(cls, config: TaskConfig, data_dir: Path) -> Path:
        """Where the arrays of ``config`` live: length, what differs from the defaults, version."""
        config = cls.resolved(config, data_dir)
        defaults = {f.name: f for f in fields(cls.Config)}
        given = [
            _short(name, value)
            for name, value in cls.parameters(config).items()
            if name != "length" and value != _default(defaults[name])
        ]
        return Path(data_dir) / cls.NAME / "-".join([f"length{config.length}", *given, f"v{cls.VERSION}"])

    @classmethod
    def identity(cls, config: TaskConfig, data_dir: Path) -> Identity:
        """What the arrays of ``config`` are, and the command that builds them."""
        config = cls.resolved(config, data_dir)
        usual_source = cls.default_source(config, Path(data_dir)) if config.source in KINDS else None
        given = [
            shlex.quote(f"task.{f.name}={getattr(config, f.name)}")
            for f in fields(config)
            if getattr(config, f.name) not in (_default(f), usual_source)
        ]
        usual = Path(os.environ.get("LRA_DATA_DIR") or "data")
        if Path(data_dir).absolute() != usual.absolute():
            given.append(shlex.quote(f"data_dir={data_dir}"))
        command = " ".join(["lra data prepare", cls.NAME, *given])
        return Identity(cls.NAME, cls.VERSION, cls.parameters(config), command)

    @classmethod
    def prepare(cls, config: TaskConfig, data_dir: Path, progress: Progress) -> Path:
        """Build the arrays unless a valid copy is there; returns their folder."""
        config = cls.resolved(config, data_dir)
        folder, identity = cls.folder(config, data_dir), cls.identity(config, data_dir)
        if os.path.exists(folder):
            cls._check_copy(config, data_dir)
            return folder
        with arrays.exclusive(folder):
            # another process may have built it meanwhile
            if os.path.exists(folder):
                cls._check_copy(config, data_dir)
                return folder
            cls.fetch(config, data_dir)
            with Writer(folder, identity, cls.layout(config)) as writer, _reading(config.source):
                writer.details["source_files"] = {
                    name: _sha256(path) for name, path in cls.source_files(config, data_dir).items()
                }
                cls.build(config, data_dir, writer, progress)
        log.info("prepared %s", folder)
        return folder

    @classmethod
    def verify(cls, config: TaskConfig, data_dir: Path) -> list[str]:
        """Recount, rehash and prove every label; one line per proven fact, ``UserError`` otherwise."""
        config = cls.resolved(config, data_dir)
        folder, identity = cls.folder(config, data_dir), cls.identity(config, data_dir)
        manifest, splits = cls._open(config, data_dir)
        facts = [f"{folder}: all files have the size and sha256 of the manifest"]
        seen: Counter[bytes] = Counter()
        try:
            for name, split in splits.items():
                _recount(name, split, manifest["splits"][name])
                proof = cls.prove(config, name, split, manifest["details"])
                for tokens, lengths, _ in blocks(split, config.length):
                    seen.update(arrays.row_hashes(tokens, lengths))
                low, high = split.sequence_lengths.min(), split.sequence_lengths.max()
                facts.append(f"{name}: {len(split)} rows of {low}..{high} tokens, counts as in the manifest; {proof}")
            repeated = seen.total() - len(seen)
            if repeated and config.source == "generated":
                raise Disproved("no row twice", f"{repeated} repeated rows")
        except Disproved as error:
            raise UserError(f"{folder}: {error}; delete or move it, then run `{identity.command}`") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise cls._lacking_details(config, data_dir, error) from error
        return [*facts, f"all splits: {repeated} rows repeat another"]

    @classmethod
    def load(cls, config: TaskConfig, data_dir: Path) -> tuple[TaskInfo, dict[str, Split]]:
        """Open the prepared arrays; ``UserError`` if they are missing, altered or of another version."""
        config = cls.resolved(config, data_dir)
        manifest, splits = cls._open(config, data_dir)
        try:
            return cls._info(config, manifest["details"], splits), splits
        except (KeyError, TypeError, AttributeError) as error:
            raise cls._lacking_details(config, data_dir, error) from error

    @classmethod
    def _open(cls, config: TaskConfig, data_dir: Path) -> tuple[dict[str, Any], dict[str, Split]]:
        """Manifest and splits, with the details that every task has; ``UserError`` if they are not right."""
        folder, identity = cls.folder(config, data_dir), cls.identity(config, data_dir)
        manifest, splits = arrays.read(folder, identity, cls.layout(config))
        for key, kind in (("source", str), ("exact", str), ("source_files", dict)):
            if not isinstance(manifest["details"].get(key), kind):
                raise cls._lacking_details(config, data_dir, KeyError(key))
        return manifest, splits

    @classmethod
    def _lacking_details(cls, config: TaskConfig, data_dir: Path, error: Exception) -> UserError:
        folder, command = cls.folder(config, data_dir), cls.identity(config, data_dir).command
        return UserError(
            f"{folder / arrays.MANIFEST}: its details lack what the task needs ({error}); delete or move {folder}, "
            f"then run `{command}`"
        )

    @classmethod
    def _info(cls, config: TaskConfig, details: dict[str, Any], splits: dict[str, Split]) -> TaskInfo:
        layout = cls.layout(config)
        lengths = splits["train"].sequence_lengths
        return TaskInfo(
            name=cls.NAME,
            version=cls.VERSION,
            vocab_size=cls.vocab_size(config, details),
            num_classes=cls.num_classes(config),
            length=config.length,
            splits={name: len(split) for name, split in splits.items()},
            metric="accuracy",
            majority_baseline=majority_share(splits["test"].labels),
            source=details["source"],
            citation=cls.CITATION,
            fidelity=config.fidelity,
            documents=layout.documents,
            outputs=layout.outputs,
            pixels=cls.pixels(config),
            lengths=length_statistics(lengths, config.length),
            warnings=tuple(cls.warnings(config, lengths, details)),
        )

    @classmethod
    def warnings(cls, config: TaskConfig, lengths: np.ndarray, details: dict[str, Any]) -> list[str]:
        """What a reader of the number must know."""
        short = float((lengths < config.length).mean())
        if cls.TRUNCATES and short > 0.5:
            return [
                f"{100 * short:.0f} % of the training sequences are shorter than {config.length} tokens "
                f"(median {np.median(lengths):.0f}): this measures less than that length"
            ]
        return []

    @classmethod
    def _check_copy(cls, config: TaskConfig, data_dir: Path) -> None:
        """Raise ``UserError`` if the copy is not valid or not of the source files of today."""
        folder, identity = cls.folder(config, data_dir), cls.identity(config, data_dir)
        recorded = cls._open(config, data_dir)[0]["details"]["source_files"]
        try:
            paths = cls.source_files(config, data_dir)
        except UserError:
            return  # the source is gone; what was made of it stays valid
        for name, path in paths.items():
            if path.is_file() and (found := _sha256(path)) != (expected := recorded.get(name)):
                raise UserError(
                    f"{path}: expected sha256 {str(expected)[:12]}..., of the file that {folder} was made from, "
                    f"found {found[:12]}...; restore it, or delete {folder} and run `{identity.command}`"
                )


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Turn what the file system refuses while a source is read into a message with the way out."""
    try:
        yield
    except OSError as error:
        place = error.filename or f"task.source={source}"
        raise UserError(
            f"{place}: cannot be read ({error.strerror or error}); restore it or fix its permissions"
        ) from error


def blocks(split: Split, length: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows of ``split`` in blocks of bounded size: tokens end to end, tokens of each row, labels."""
    step = max(1, BLOCK_TOKENS // (length * split.documents))
    totals = split.sequence_lengths.reshape(-1, split.documents).sum(axis=1)
    for start in range(0, len(split), step):
        stop = min(start + step, len(split))
        yield split.flat(start, stop), totals[start:stop], split.labels[start:stop]


def _recount(name: str, split: Split, entry: dict[str, Any]) -> None:
    labels = Counter(split.labels.ravel().tolist())
    for key, found in arrays.describe(split.sequence_lengths, labels, split.documents).items():
        if entry.get(key) != found:
            raise Disproved(f"{key} of {name} to be {entry.get(key)} as in the manifest", found)


def _default(field: Field) -> Any:  # noqa: ANN401
    return field.default_factory() if field.default is MISSING else field.default


def _short(name: str, value: object) -> str:
    """An option as part of a folder's name; a path by its hash."""
    text = str(value)
    if name in ("fidelity", "source") and text.isalnum():
        return text
    text = text if text.replace(".", "").isalnum() else hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name.replace('_', '')}{text}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
