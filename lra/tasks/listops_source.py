"""Reading ListOps rows from the files of the Long Range Arena release."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lra.errors import UserError
from lra.paths import refuse_gzip
from lra.tasks.listops_expressions import evaluate, explain, tokenise
from lra.tasks.listops_generator import Rows

FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
BLOCK_ROWS = 1000
FIRST_LINE = 2
"""Of the rows, below the header."""


def paths(source: Path) -> dict[str, Path]:
    """The file of each split; ``UserError`` if one is not there."""
    found = {split: source / name for split, name in FILES.items()}
    for path in found.values():
        if not path.is_file():
            raise UserError(
                f"task.source={source}: expected {', '.join(FILES.values())} in it, found no {path.name}; "
                "name the folder that holds LRA's files, or leave it out to generate rows"
            )
        refuse_gzip(path)
    return found


def count_rows(path: Path) -> int:
    """Number of lines below the header; ``UserError`` if there are none."""
    with path.open("rb") as file:
        rows = sum(1 for _ in file) - 1
    if rows < 1:
        raise UserError(f"{path}: expected rows below the header, found none; get the file again")
    return rows


def read(path: Path, length: int, chosen: np.ndarray) -> Iterator[tuple[Rows, int]]:
    """Blocks of the rows ``chosen`` by number, ascending, cut to their first ``length`` tokens, each with the number
    of rows that were longer.

    The value of a row is checked against its label before it is cut.
    """
    expressions: list[np.ndarray] = []
    labels: list[int] = []
    lines: list[int] = []
    wanted = set((chosen + FIRST_LINE).tolist())
    for line, expression, label in _parse(path):
        if line not in wanted:
            continue
        expressions.append(expression)
        labels.append(label)
        lines.append(line)
        if len(lines) == BLOCK_ROWS:
            yield _block(path, lines, expressions, labels, length)
            expressions, labels, lines = [], [], []
    if lines:
        yield _block(path, lines, expressions, labels, length)


def _parse(path: Path) -> Iterator[tuple[int, np.ndarray, int]]:
    """Line number, token ids and label of every row."""
    # undecodable bytes become a symbol that tokenise rejects with its line
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        header = file.readline().rstrip("\r\n").split("\t")
        if missing := [name for name in ("Source", "Target") if name not in header]:
            raise UserError(
                f"{path}:1: expected the tab-separated columns Source and Target, "
                f"found no {' and no '.join(missing)}; restore the header line"
            )
        source, target = header.index("Source"), header.index("Target")
        for line, text in enumerate(file, start=FIRST_LINE):
            cells = text.rstrip("\r\n").split("\t")
            if len(cells) != len(header):
                raise UserError(
                    f"{path}:{line}: expected {len(header)} columns, found {len(cells)}; correct or remove the row"
                )
            label = cells[target].strip()
            if label not in tuple("0123456789"):
                raise UserError(f"{path}:{line}: expected a label 0..9, found {label!r}; correct or remove the row")
            try:
                yield line, tokenise(cells[source]), int(label)
            except UserError as error:
                raise UserError(f"{path}:{line}: {error}") from None


def _block(
    path: Path, lines: list[int], expressions: list[np.ndarray], labels: list[int], length: int
) -> tuple[Rows, int]:
    lengths = np.array([len(expression) for expression in expressions])
    expected = np.array(labels)
    values = evaluate(np.concatenate(expressions), lengths)
    for i in np.flatnonzero(values != expected):
        found = explain(expressions[i]) if values[i] < 0 else f"the row's value is {values[i]}"
        raise UserError(
            f"{path}:{lines[i]}: expected an expression of value {labels[i]}, but {found}; correct or remove the row"
        )
    cut = np.concatenate([expression[:length] for expression in expressions])
    return Rows(cut, np.minimum(lengths, length), expected), int((lengths > length).sum())
