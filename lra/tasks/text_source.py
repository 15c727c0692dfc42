"""Reading IMDb reviews: the Hub's parquet files, or the folder tree ``aclImdb`` of the original archive."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lra.data import sources
from lra.errors import UserError

REPO, REVISION = "stanfordnlp/imdb", "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
COLUMNS = {"text": "text", "label": "label"}
SPLITS = ("train", "test")
CLASSES = ("neg", "pos")
"""Names of the labels 0 and 1, and the folders of ``aclImdb``."""
ROWS = 25_000
"""In train and in test."""
BLOCK_ROWS = 1000


@dataclass(frozen=True)
class Reviews:
    """The rows of one split in the order of the source."""

    texts: list[bytes]
    """UTF-8, none empty."""
    labels: np.ndarray
    """0 negative, 1 positive, (R,)."""
    digests: list[bytes]
    """SHA-256 of each text."""


def fetch(source: str, data_dir: Path) -> None:
    """Download what is not on this machine."""
    if _locate(source, data_dir) is None:
        sources.load(REPO, REVISION, COLUMNS, source=source, data_dir=data_dir)


def lacking(source: str, data_dir: Path) -> str | None:
    """What to get if the reviews are not on this machine."""
    if _locate(source, data_dir) is not None:
        return None
    folder = sources.mirrors(REPO, data_dir)[-1]
    return f"{REPO} from the Hugging Face Hub, or its train-*.parquet and test-*.parquet in {folder}"


def files(source: str, data_dir: Path) -> dict[str, Path]:
    """The parquet files on this machine; none for a tree, of which the fingerprint of the texts is the proof."""
    if (folder := _locate(source, data_dir)) is None or _tree(folder):
        return {}
    tables = sources.load(REPO, REVISION, COLUMNS, source=str(folder), data_dir=data_dir)
    return {name: path for table in tables.values() for name, path in table.files.items()}


def describe(source: str, data_dir: Path) -> tuple[str, Path]:
    """Where the rows are from, for people, and the folder that they are read from."""
    folder = _locate(source, data_dir)
    if source == "hub":
        return f"{REPO} of the Hugging Face Hub at {REVISION[:8]}, in {folder}", folder
    return (f"the tree of text files in {_tree(folder)}" if _tree(folder) else f"parquet files in {folder}"), folder


def read(source: str, data_dir: Path, split: str) -> Reviews:
    """All reviews of ``split``, about 35 MB; ``source`` is ``hub``, a folder in the Hub's layout, or ``aclImdb``.

    Raises ``UserError`` for files that are missing or damaged, another label than 0 and 1, and an empty text.
    """
    folder = _locate(source, data_dir)
    tree = folder and _tree(folder)
    texts: list[bytes] = []
    labels: list[int] = []
    for where, text, label in _tree_rows(tree, split) if tree else _table_rows(source, data_dir, split):
        if label not in (0, 1):
            raise UserError(f"{where}: expected label 0 or 1, found {label}; name a copy with labels")
        if not text:
            raise UserError(f"{where}: expected a text, found an empty one; correct or remove it")
        texts.append(text)
        labels.append(label)
    if source == "hub" and len(texts) != ROWS:
        raise UserError(
            f"{folder}: expected {ROWS} rows in {split} as the Hub has, found {len(texts)}; get the files again, or "
            f"name the folder to use it as it is: task.source={folder}"
        )
    return Reviews(texts, np.array(labels, dtype=np.int64), [hashlib.sha256(text).digest() for text in texts])


def _locate(source: str, data_dir: Path) -> Path | None:
    return sources.locate(REPO, REVISION, source=source, data_dir=data_dir)


def _tree(folder: Path) -> Path | None:
    """The folder ``aclImdb``, whether it or its parent was named; one class of one split is enough to know it."""
    places = [path / split / name for path in (folder, folder / "aclImdb") for split in SPLITS for name in CLASSES]
    return next((place.parents[1] for place in places if place.is_dir()), None)


def _table_rows(source: str, data_dir: Path, split: str) -> Iterator[tuple[str, bytes, int]]:
    table = sources.load(REPO, REVISION, COLUMNS, source=source, data_dir=data_dir)[split]
    row = 0
    for batch in table.batches(BLOCK_ROWS):
        for text, label in zip(batch["text"], batch["label"]):
            yield f"{table.root}, row {row} of {split}", text.encode(), label
            row += 1


def _tree_rows(tree: Path, split: str) -> Iterator[tuple[str, bytes, int]]:
    for label, name in enumerate(CLASSES):
        for path in _reviews(tree / split / name):
            try:
                # a pipe would be waited for without end
                if not path.is_file():
                    raise UserError(f"{path}: expected a file, found something else or nothing; get the archive again")
                text = path.read_bytes()
                text.decode()
            except OSError as error:
                raise UserError(f"{path}: cannot read it ({error.strerror}); get the archive again") from None
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}: expected UTF-8, found byte 0x{text[error.start]:02x} at {error.start}; "
                    "get the archive again"
                ) from None
            yield str(path), text, label


def _reviews(folder: Path) -> list[Path]:
    """The files of one class, in order."""
    try:
        # unlike glob this does not take a folder that may not be read for an empty one
        names = sorted(os.listdir(folder)) if folder.exists() else []
    except OSError as error:
        raise UserError(f"{folder}: cannot read it ({error.strerror}); fix its permissions") from None
    # not the hidden files that some systems leave beside them
    paths = [folder / name for name in names if name.endswith(".txt") and not name.startswith(".")]
    if not paths:
        raise UserError(f"{folder}: expected reviews in files *.txt, found none; unpack the archive again")
    return paths
