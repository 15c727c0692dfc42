"""ListOps: the value of a nested list of operations, a digit.

Rows are generated with the distribution of Long Range Arena's, or read from the files of its release.
"""

import hashlib
import logging
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import arrays
from lra.data.arrays import Identity, Split, Writer
from lra.errors import UserError
from lra.tasks import listops_source
from lra.tasks.base import TaskConfig, TaskInfo, majority_share
from lra.tasks.listops_expressions import MAX_ARGS, VOCAB_SIZE, decode, evaluate, tokenise
from lra.tasks.listops_generator import Grammar, Rows, chunk

__all__ = ["Config", "ListOps", "decode", "default_depth", "evaluate", "tokenise"]

VERSION = "1"
NATIVE_LENGTH = 2000
NATIVE_DEPTH = 10
SHORTEST, LONGEST = 16, 32_768
"""Below, hardly any distinct rows exist; above, 100,000 rows take more than a few minutes and 2 GB."""
MOST_FRUITLESS_CHUNKS = 20
CITATION = "Nangia and Bowman, NAACL-SRW 2018 (arXiv 1804.06028); Tay et al., ICLR 2021 (arXiv 2011.04006)"

log = logging.getLogger(__name__)


@dataclass
class Config(TaskConfig):
    """Which ListOps rows. A longer ``length`` means longer rows, not more padding."""

    name: str = "listops"
    length: int = NATIVE_LENGTH
    """Rows have more than a quarter of and less than this many tokens."""
    seed: int = 0
    """Of the data; the seed of training is another."""
    source: str = ""
    """Folder with LRA's ``basic_{train,val,test}.tsv``; empty generates rows."""
    train_rows: int = 96_000
    validation_rows: int = 2_000
    test_rows: int = 2_000
    max_depth: int = 0
    """Levels of the tree, the root and the digits counted; 0 chooses by length, see ``default_depth``."""
    max_args: int = MAX_ARGS
    """Most arguments of an operator."""


def default_depth(length: int) -> int:
    """LRA's 10 up to its own length; beyond, deep enough to reach it.

    A node has 1/4 * 6 = 1.5 children on average, so the mean tree grows by that factor a level, and a length
    of 1.5 ** k times LRA's takes k levels more for about the same share of trees to be of allowed length.
    """
    return NATIVE_DEPTH + max(0, round(math.log(length / NATIVE_LENGTH, 1.5)))


class ListOps:
    """See ``lra.tasks.base.Task``."""

    Config = Config

    @staticmethod
    def check(config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        if config.source:
            defaults = Config()
            for name in ("seed", "train_rows", "validation_rows", "test_rows", "max_depth", "max_args"):
                if getattr(config, name) != getattr(defaults, name):
                    raise UserError(f"task.{name} is for generated rows; remove it, or remove task.source")
        limits = {
            "length": (1 if config.source else SHORTEST, LONGEST),
            "seed": (0, 2**63 - 1),
            "train_rows": (1, 10**9),
            "validation_rows": (1, 10**9),
            "test_rows": (1, 10**9),
            "max_args": (2, MAX_ARGS),
        }
        if config.max_depth:
            limits["max_depth"] = (2, 100)
        for name, (low, high) in limits.items():
            value = getattr(config, name)
            if not low <= value <= high:
                raise UserError(f"task.{name}={value}: listops takes {low}..{high}; choose a number in that range")

    @staticmethod
    def folder(config: Config, data_dir: Path) -> Path:
        """Where the arrays of ``config`` live: length and seed, then what differs from the defaults."""
        name = [f"length{config.length}"]
        if config.source:
            path = str(_source(config))
            name.append("lra" + hashlib.sha256(path.encode()).hexdigest()[:8])
        else:
            defaults, depth = Config(), _depth(config)
            rows = [(c.train_rows, c.validation_rows, c.test_rows) for c in (config, defaults)]
            name.append(f"seed{config.seed}")
            if rows[0] != rows[1]:
                name.append("rows" + "x".join(map(str, rows[0])))
            if depth != default_depth(config.length):
                name.append(f"depth{depth}")
            if config.max_args != defaults.max_args:
                name.append(f"args{config.max_args}")
        return Path(data_dir) / "listops" / "-".join([*name, f"v{VERSION}"])

    @staticmethod
    def prepare(config: Config, data_dir: Path, progress: Callable[[int, int], None]) -> Path:
        """Build the arrays unless a valid copy is there; ``progress(done, total)`` in rows."""
        ListOps.check(config)
        folder, identity = ListOps.folder(config, data_dir), _identity(config, data_dir)
        if os.path.exists(folder):
            _check_copy(config, folder)
            return folder
        with arrays.exclusive(folder):
            # another process may have built it meanwhile
            if os.path.exists(folder):
                _check_copy(config, folder)
                return folder
            with Writer(folder, identity) as writer:
                if config.source:
                    _read_source(config, writer, progress)
                else:
                    _generate(config, writer, progress)
        log.info("prepared %s", folder)
        return folder

    @staticmethod
    def verify(config: Config, data_dir: Path) -> list[str]:
        """Recount, rehash and recompute every label; one line per proven fact, ``UserError`` otherwise."""
        ListOps.check(config)
        folder = ListOps.folder(config, data_dir)
        manifest, splits = arrays.read(folder, _identity(config, folder.parents[1]))
        truncated = manifest["details"].get("truncated_rows", dict.fromkeys(splits, 0))
        if not (isinstance(truncated, dict) and all(isinstance(truncated.get(name), int) for name in splits)):
            raise _disproved(config, folder, "details.truncated_rows to count the rows of every split", truncated)
        facts = [f"{folder}: all files have the size and sha256 of the manifest"]
        seen: Counter[bytes] = Counter()
        for name, split in splits.items():
            _check_counts(config, folder, name, split, manifest["splits"][name])
            _check_labels(config, folder, name, split, truncated[name])
            for tokens, lengths, _ in _blocks(config, split):
                seen.update(arrays.row_hashes(tokens, lengths))
            facts.append(
                f"{name}: {len(split)} rows of {split.lengths.min()}..{split.lengths.max()} tokens, "
                f"counts as in the manifest; {len(split) - truncated[name]} labels recomputed and equal"
                + (f", {truncated[name]} truncated rows have none" if truncated[name] else "")
            )
        repeated = seen.total() - len(seen)
        if repeated and not config.source:
            raise _disproved(config, folder, "no row twice", f"{repeated} repeated rows")
        return [*facts, f"all splits: {repeated} rows repeat another"]

    @staticmethod
    def load(config: Config, data_dir: Path) -> tuple[TaskInfo, dict[str, Split]]:
        """Open the prepared arrays; ``UserError`` if they are missing, altered or of another version."""
        ListOps.check(config)
        _, splits = arrays.read(ListOps.folder(config, data_dir), _identity(config, data_dir))
        info = TaskInfo(
            name="listops",
            version=VERSION,
            vocab_size=VOCAB_SIZE,
            num_classes=10,
            length=config.length,
            splits={name: len(split) for name, split in splits.items()},
            metric="accuracy",
            majority_baseline=majority_share(splits["test"].labels),
            source=f"LRA's files in {config.source}" if config.source else f"generated with seed {config.seed}",
            citation=CITATION,
        )
        return info, splits


def _depth(config: Config) -> int:
    return config.max_depth or default_depth(config.length)


def _source(config: Config) -> Path:
    return Path(config.source).expanduser().resolve()


def _identity(config: Config, data_dir: Path) -> Identity:
    """What the arrays of ``config`` are, and the command that builds them."""
    parameters: dict[str, int | float | str] = {"length": config.length}
    if config.source:
        parameters["source"] = str(_source(config))
    else:
        for name in ("seed", "train_rows", "validation_rows", "test_rows", "max_args"):
            parameters[name] = getattr(config, name)
        parameters["max_depth"] = _depth(config)
    given = [
        shlex.quote(f"task.{f.name}={getattr(config, f.name)}")
        for f in fields(Config)
        if getattr(config, f.name) != f.default
    ]
    usual = Path(os.environ.get("LRA_DATA_DIR") or "data")
    if Path(data_dir).absolute() != usual.absolute():
        given.append(shlex.quote(f"data_dir={data_dir}"))
    return Identity("listops", VERSION, parameters, " ".join(["lra data prepare listops", *given]))


def _counts(config: Config) -> dict[str, int]:
    """Rows of each split in the order of generation.

    Evaluation splits come first, so that they stay the same when only the number of training rows changes.
    """
    return {"test": config.test_rows, "validation": config.validation_rows, "train": config.train_rows}


def _generate(config: Config, writer: Writer, progress: Callable[[int, int], None]) -> None:
    counts = _counts(config)
    done, total = 0, sum(counts.values())
    stream = _distinct(config)
    rows = next(stream)
    for split, count in counts.items():
        while count:
            if not len(rows.labels):
                rows = next(stream)
            head, rows = rows.cut(count)
            writer.append(split, *head)
            count -= len(head.labels)
            done += len(head.labels)
            progress(done, total)


def _distinct(config: Config) -> Iterator[Rows]:
    """Generated rows, chunk after chunk, without those that came before."""
    grammar = Grammar(config.length, _depth(config), config.max_args)
    seen: set[bytes] = set()
    index = fruitless = 0
    while fruitless < MOST_FRUITLESS_CHUNKS:
        rows = chunk(grammar, config.seed, index)
        index += 1
        new = np.zeros(len(rows.labels), bool)
        for i, key in enumerate(arrays.row_hashes(rows.tokens, rows.lengths)):
            new[i] = key not in seen
            seen.add(key)
        fruitless = 0 if new.any() else fruitless + 1
        if new.any():
            yield rows.only(new)
    raise UserError(
        f"task.length={config.length}, task.max_depth={grammar.max_depth}, task.max_args={config.max_args}: "
        f"expected {sum(_counts(config).values())} distinct rows, found no more than "
        f"{len(seen)}; ask for fewer rows, or for a depth and number of arguments that reach the length"
    )


def _read_source(config: Config, writer: Writer, progress: Callable[[int, int], None]) -> None:
    paths = listops_source.paths(_source(config))
    writer.details["source_files"] = listops_source.hashes(_source(config))
    writer.details["truncated_rows"] = truncated = dict.fromkeys(paths, 0)
    # without the headers; a last line without an end is not counted, so the end may be passed by a row a file
    done, total = 0, sum(listops_source.count_lines(path) - 1 for path in paths.values())
    for split, path in paths.items():
        for rows, cut in listops_source.read(path, config.length):
            writer.append(split, *rows)
            truncated[split] += cut
            done += len(rows.labels)
            progress(done, max(done, total))


def _check_copy(config: Config, folder: Path) -> None:
    """Raise ``UserError`` if the copy in ``folder`` is not valid or not of the source files of today."""
    manifest, _ = arrays.read(folder, _identity(config, folder.parents[1]))
    if config.source and _source(config).is_dir():
        for name, found in listops_source.hashes(_source(config)).items():
            if found != (expected := manifest["details"]["source_files"][name]):
                raise UserError(
                    f"{_source(config) / name}: expected sha256 {expected[:12]}..., of the file that "
                    f"{folder} was made from, found {found[:12]}...; restore it, or delete {folder} "
                    f"and run `{_identity(config, folder.parents[1]).command}`"
                )


def _blocks(config: Config, split: Split) -> Iterator[Rows]:
    """The rows of ``split`` in blocks of bounded size."""
    step = max(1, 2_000_000 // config.length)
    for start in range(0, len(split), step):
        stop = min(start + step, len(split))
        yield Rows(split.flat(start, stop), split.lengths[start:stop], split.labels[start:stop])


def _check_counts(config: Config, folder: Path, name: str, split: Split, entry: dict[str, Any]) -> None:
    recounted = arrays.describe(split.lengths, Counter(split.labels.tolist()))
    for key, found in recounted.items():
        if entry.get(key) != found:
            raise _disproved(config, folder, f"{key} of {name} to be {entry.get(key)} as in the manifest", found)
    shortest = 1 if config.source else config.length // 4 + 1
    longest = config.length if config.source else config.length - 1
    low, high = split.lengths.min(), split.lengths.max()
    if low < shortest or high > longest:
        raise _disproved(config, folder, f"{shortest}..{longest} tokens a row in {name}", f"{low}..{high}")


def _check_labels(config: Config, folder: Path, name: str, split: Split, truncated: int) -> None:
    """Evaluate every row; only rows that were cut may have no value."""
    cut = row = 0
    for tokens, lengths, labels in _blocks(config, split):
        values = evaluate(tokens, lengths)
        excused = (values < 0) & (lengths == config.length) & (truncated > 0)
        if (wrong := np.flatnonzero((values != labels) & ~excused)).size:
            i = wrong[0]
            raise _disproved(config, folder, f"row {row + i} of {name} to have value {labels[i]}", values[i])
        cut += int(excused.sum())
        row += len(labels)
    if cut != truncated:
        raise _disproved(config, folder, f"{truncated} truncated rows in {name}", cut)


def _disproved(config: Config, folder: Path, expected: str, found: object) -> UserError:
    command = _identity(config, folder.parents[1]).command
    return UserError(f"{folder}: expected {expected}, found {found}; delete or move it, then run `{command}`")
