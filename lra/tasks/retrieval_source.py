"""Pairs of papers from the files of the Long Range Arena release.

A line is ``label<TAB>id1<TAB>id2<TAB>text1<TAB>text2`` without header and without quoting: a double quote is a
character like any other. Files with the first three columns only are joined with a folder of the papers' texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lra.errors import UserError
from lra.paths import refuse_gzip

FILES = {
    "train": "new_aan_pairs.train.tsv",
    "validation": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
PAPERS = "papers_text"
COLUMNS = ("label", "id1", "id2", "text1", "text2")
IDS_ONLY = 3
MOST_LINE = 1 << 26
"""Bytes; a longer line is no row, and reading on would fill the memory."""
LABELS = {b"0.0": 0, b"1.0": 1, b"0": 0, b"1": 1}
"""The usual spellings; others are parsed."""
# a line of a TSV file cannot hold these either, so a joined text is as long as the paper
_TO_SPACES = bytes.maketrans(b"\t\n\r", b"   ")


class Pair(NamedTuple):
    """One row, and the line that it is in."""

    line: int
    label: int
    documents: tuple[bytes, bytes]


@dataclass(frozen=True)
class Source:
    """The files of the three splits, and the folder of papers if they have ids only."""

    files: dict[str, Path]
    papers: Path | None


def open_source(folder: Path, data_dir: Path) -> Source:
    """The source in ``folder``; ``UserError`` if a file or the papers of id-only files are missing."""
    files = {split: folder / name for split, name in FILES.items()}
    for path in files.values():
        if not path.is_file():
            raise UserError(
                f"task.source={folder}: expected {', '.join(FILES.values())} in it, found no {path.name}; "
                "name the folder tsv_data of LRA's release, or the release"
            )
        refuse_gzip(path)
    if all(_columns(path) == len(COLUMNS) for path in files.values()):
        return Source(files, None)
    places = (folder / PAPERS, data_dir / PAPERS)
    papers = next((place for place in places if place.is_dir()), None)
    if papers is None:
        raise UserError(
            f"{folder}: expected rows of {len(COLUMNS)} columns ({', '.join(COLUMNS)}), found ids without texts; "
            f"put the texts of the ACL Anthology Network's papers as <id>.txt into {' or '.join(map(str, places))}"
        )
    return Source(files, papers)


def papers_of(papers: Path) -> dict[str, Path]:
    """All papers in the folder, by the name that the manifest gives them."""
    return {f"{PAPERS}/{path.name}": path for path in sorted(papers.glob("*.txt"))}


def count_rows(path: Path) -> int:
    """Rows of a file; ``UserError`` if there are none."""
    rows = sum(1 for _ in _lines(path))
    if not rows:
        raise UserError(f"{path}: expected rows, found an empty file; get it again")
    return rows


def read(path: Path, papers: Path | None) -> Iterator[Pair]:
    """Every row of a file, whole texts; ``UserError`` names file and line of one that is none."""
    columns = _columns(path)
    for line, text in _lines(path):
        cells = text.split(b"\t")
        if len(cells) != columns:
            raise UserError(
                f"{path}:{line}: expected {columns} tab-separated columns ({', '.join(COLUMNS[:columns])}), "
                f"found {len(cells)}; correct or remove the row"
            )
        label = LABELS.get(cells[0])
        if label is None:
            label = _label(path, line, cells[0])
        if columns == IDS_ONLY:
            documents = tuple(_paper(path, line, papers, cells[i]) for i in (1, 2))
        else:
            documents = (cells[3], cells[4])
        yield Pair(line, label, documents)


def _columns(path: Path) -> int:
    """Columns that the first row tells to expect."""
    first = next(_lines(path), (1, b""))[1]
    return IDS_ONLY if first.count(b"\t") == IDS_ONLY - 1 else len(COLUMNS)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line, without its end (LF or CR LF)."""
    with path.open("rb", buffering=1 << 20) as file:
        for number in count(1):
            line = file.readline(MOST_LINE)
            if not line:
                return
            if len(line) == MOST_LINE and not line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: expected a row, found a line over {MOST_LINE} bytes; get it again")
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _label(path: Path, line: int, cell: bytes) -> int:
    try:
        value = float(cell)
    except ValueError:
        value = None
    if value not in (0, 1):
        found = cell[:20].decode("utf-8", "backslashreplace")
        raise UserError(f"{path}:{line}: expected a label 0 or 1, found {found!r}; correct or remove the row")
    return int(value)


def _paper(path: Path, line: int, papers: Path, name: bytes) -> bytes:
    text = name.decode("utf-8", "backslashreplace")
    if not text or "/" in text or "\0" in text:
        raise UserError(f"{path}:{line}: expected the id of a paper, found {text!r}; correct or remove the row")
    try:
        return (papers / f"{text}.txt").read_bytes().translate(_TO_SPACES)
    except OSError as error:
        raise UserError(
            f"{path}:{line}: expected the text of paper {text} in {papers}, found none of {text}.txt "
            f"({error.strerror}); put it there or remove the row"
        ) from None
