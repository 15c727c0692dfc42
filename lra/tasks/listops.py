"""ListOps: the value of a nested list of operations, a digit.

Rows are generated with the distribution of Long Range Arena's, or read from the files of its release.
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
from lra.tasks import listops_source
from lra.tasks.base import TaskConfig
from lra.tasks.listops_expressions import (
    MAX_ARGS,
    S4_VOCAB_SIZE,
    VOCAB_SIZE,
    decode,
    evaluate,
    tokenise,
    with_eos,
    without_eos,
)
from lra.tasks.listops_generator import Grammar, Rows, chunk
from lra.tasks.prepared import Disproved, PreparedTask, Progress, blocks

__all__ = ["Config", "ListOps", "decode", "default_depth", "evaluate", "tokenise"]

NATIVE_LENGTH = 2000
S4_LENGTH = 2048
"""S4's limit for LRA's rows and the EOS after each; not rows of that length."""
NATIVE_DEPTH = 10
FOLDER = "listops-1000"
SHORTEST, LONGEST = 16, 32_768
"""Below, hardly any distinct rows exist; above, 100,000 rows take more than a few minutes and 2 GB."""
MOST_FRUITLESS_CHUNKS = 20
GENERATED_ONLY = ("seed", "max_depth", "max_args")
ROWS = ("train_rows", "validation_rows", "test_rows")


@dataclass
class Config(TaskConfig):
    """Which ListOps rows. A longer ``length`` means longer rows, not more padding."""

    name: str = "listops"
    length: int = NATIVE_LENGTH
    """Rows have more than a quarter of and less than this many tokens; with ``fidelity=s4`` EOS is one more."""
    seed: int = 0
    """Of the data; the seed of training is another."""
    train_rows: int = 96_000
    """Of files another number is a fixed choice of so many rows; this one, LRA's, and 0 are all."""
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


class ListOps(PreparedTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "listops"
    VERSION = "1"
    CITATION = "Nangia and Bowman, NAACL-SRW 2018 (arXiv 1804.06028); Tay et al., ICLR 2021 (arXiv 2011.04006)"
    NUM_CLASSES = 10
    KINDS = ("generated", "release")

    @classmethod
    def default_source(cls, config: Config, data_dir: Path) -> str:
        """LRA's own rows if they are here and nothing else is asked for; rows of any length can be generated."""
        plain = all(getattr(config, name) == getattr(Config(), name) for name in (*GENERATED_ONLY, *ROWS))
        found = plain and _is_native(config) and release.find(data_dir, FOLDER)
        return "release" if found else "generated"

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        generated = config.source in ("auto", "generated")
        if not generated:
            for name in GENERATED_ONLY:
                if getattr(config, name) != getattr(Config(), name):
                    raise UserError(f"task.{name} is for generated rows; remove it, or remove task.source")
        if config.source == "release" and not _is_native(config):
            raise UserError(
                f"task.length={config.length}: LRA's release has rows of 501 to 1999 tokens; give task.length="
                f"{NATIVE_LENGTH} ({S4_LENGTH} with task.fidelity=s4), or task.source=generated for others"
            )
        cls.check_ranges(
            config,
            length=(SHORTEST if generated else 1 + _eos(config), LONGEST),
            seed=(0, 2**63 - 1),
            **dict.fromkeys(ROWS, (int(generated), 10**9)),
            max_args=(2, MAX_ARGS),
        )
        if config.max_depth:
            cls.check_ranges(config, max_depth=(2, 100))

    @classmethod
    def parameters(cls, config: Config) -> dict[str, int | float | str]:
        """Those of the generator, or of the files that are read."""
        parameters = {"length": config.length, "fidelity": config.fidelity, "source": config.source}
        if config.source != "generated":
            asked = {f"{split}_rows": _asked(config, split)[0] for split in arrays.SPLITS}
            return parameters | {name: rows for name, rows in asked.items() if rows}
        depth = _depth(config)
        return {
            **parameters,
            # the order is that of the words in the names of folders
            **{name: getattr(config, name) for name in ("seed", *ROWS, "max_depth", "max_args")},
            "max_depth": 0 if depth == default_depth(config.length) else depth,
        }

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """15 symbols and padding; in S4's also EOS and an unknown symbol that never occurs."""
        return VOCAB_SIZE if config.fidelity == "lra" else S4_VOCAB_SIZE

    @classmethod
    def fetch(cls, config: Config, data_dir: Path) -> None:
        """Unpack the release's archive if that is the source."""
        if config.source != "generated":
            release.folder(config.source, FOLDER, data_dir)

    @classmethod
    def source_files(cls, config: Config, data_dir: Path) -> dict[str, Path]:
        """LRA's three files."""
        if config.source == "generated":
            return {}
        return {path.name: path for path in _paths(config, data_dir).values()}

    @classmethod
    def build(cls, config: Config, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Generate rows or read LRA's."""
        if config.source == "generated":
            writer.details["source"] = f"generated with seed {config.seed}"
            writer.details["exact"] = "distribution of LRA's generator; the released rows cannot be made again"
            _generate(config, writer, progress)
        else:
            paths = _paths(config, data_dir)
            writer.details["source"] = f"LRA's files in {paths['train'].parent}"
            writer.details["exact"] = "the rows of the files"
            _read_source(config, paths, writer, progress)

    @classmethod
    def prove(cls, config: Config, name: str, split: Split, details: dict[str, Any]) -> str:
        """Evaluate every row; only rows that were cut may have no value."""
        eos = _eos(config)
        most = config.length - eos
        shortest, longest = 1, most
        if config.source == "generated":
            shortest, longest = _grammar(config).length // 4 + 1, _grammar(config).length - 1
        low, high = split.lengths.min() - eos, split.lengths.max() - eos
        if low < shortest or high > longest:
            raise Disproved(f"{shortest}..{longest} tokens a row in {name}", f"{low}..{high}")
        truncated = details.get("truncated_rows", {}).get(name, 0)
        cut = row = 0
        for tokens, lengths, labels in blocks(split, config.length):
            if eos and (rows := without_eos(tokens, lengths)) is None:
                raise Disproved(f"EOS as the last token of each row of {name} and nowhere else", "others")
            tokens, lengths = rows if eos else (tokens, lengths)
            values = evaluate(tokens, lengths)
            excused = (values < 0) & (lengths == most) & (truncated > 0)
            if (wrong := np.flatnonzero((values != labels) & ~excused)).size:
                i = wrong[0]
                raise Disproved(f"row {row + i} of {name} to have value {labels[i]}", values[i])
            cut += int(excused.sum())
            row += len(labels)
        if cut != truncated:
            raise Disproved(f"{truncated} truncated rows in {name}", cut)
        text = f"{len(split) - truncated} labels recomputed and equal"
        return f"{text}, {truncated} truncated rows have none" if truncated else text


def _is_native(config: Config) -> bool:
    """Whether LRA's rows are whole at the length that is asked for, and it is theirs."""
    return config.length == NATIVE_LENGTH or config.length == S4_LENGTH and config.fidelity == "s4"


def _depth(config: Config) -> int:
    return config.max_depth or default_depth(config.length)


def _grammar(config: Config) -> Grammar:
    """What is generated: LRA's rows at LRA's and at S4's length, which leaves room for EOS."""
    return Grammar(NATIVE_LENGTH if _is_native(config) else config.length, _depth(config), config.max_args)


def _eos(config: Config) -> int:
    """Tokens a row besides the expression."""
    return int(config.fidelity == "s4")


def _append(config: Config, writer: Writer, split: str, rows: Rows) -> None:
    tokens, lengths = with_eos(rows.tokens, rows.lengths) if _eos(config) else (rows.tokens, rows.lengths)
    writer.append(split, tokens, lengths, rows.labels)


def _paths(config: Config, data_dir: Path) -> dict[str, Path]:
    return listops_source.paths(release.folder(config.source, FOLDER, data_dir, unpack=False))


def _counts(config: Config) -> dict[str, int]:
    """Rows of each split in the order of generation.

    Evaluation splits come first, so that they stay the same when only the number of training rows changes.
    """
    return {"test": config.test_rows, "validation": config.validation_rows, "train": config.train_rows}


def _generate(config: Config, writer: Writer, progress: Progress) -> None:
    counts = _counts(config)
    done, total = 0, sum(counts.values())
    stream = _distinct(config)
    rows = next(stream)
    for split, count in counts.items():
        while count:
            if not len(rows.labels):
                rows = next(stream)
            head, rows = rows.cut(count)
            _append(config, writer, split, head)
            count -= len(head.labels)
            done += len(head.labels)
            progress(done, total)


def _distinct(config: Config) -> Iterator[Rows]:
    """Generated rows, chunk after chunk, without those that came before."""
    grammar = _grammar(config)
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


def _asked(config: Config, split: str) -> tuple[int, str]:
    """Rows to take of a split of the source, 0 for all, and the key that says so."""
    name = f"{split}_rows"
    rows = getattr(config, name)
    return (0 if rows == getattr(Config(), name) else rows), f"task.{name}"


def _read_source(config: Config, paths: dict[str, Path], writer: Writer, progress: Progress) -> None:
    most = config.length - _eos(config)
    writer.details["truncated_rows"] = truncated = dict.fromkeys(paths, 0)
    chosen = {split: choose(listops_source.count_rows(path), *_asked(config, split)) for split, path in paths.items()}
    done, total = 0, sum(map(len, chosen.values()))
    for split, path in paths.items():
        for rows, cut in listops_source.read(path, most, chosen[split]):
            _append(config, writer, split, rows)
            truncated[split] += cut
            done += len(rows.labels)
            progress(done, total)
