"""Ragged integer arrays on disk: rows of tokens with a label each, in named splits, described by a manifest.

A folder holds ``<split>.{tokens,offsets,labels}.bin`` (flat little-endian arrays; sequence i is
``tokens[offsets[i]:offsets[i + 1]]``) and ``manifest.json``. It appears under its name complete or not at
all, and a reader accepts it only if it is what was asked for, byte by byte.

Shapes: R rows, B rows of a batch, N documents a row (2 where two are compared, else 1), M outputs a row.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from lra.errors import UserError

FORMAT = 2
"""Version of the layout on disk."""
MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")
PARTS = ("tokens", "offsets", "labels")
TOKEN_DTYPES = ("|u1", "<u2")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What a folder of arrays is of. A reader accepts no other."""

    task: str
    version: str
    parameters: dict[str, int | float | str]
    """All options that decide which rows there are, the seed among them."""
    command: str
    """Builds the folder; named in errors as the way out, not compared."""


@dataclass(frozen=True)
class Layout:
    """What one row is made of."""

    documents: int = 1
    """Sequences a row: 2 where two documents are compared. They lie side by side."""
    outputs: int = 0
    """Labels a row, one for each of its last positions; 0 is one label for the whole row."""
    token_dtype: str = "|u1"


class Split:
    """The rows of one split; tokens stay on disk."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray, documents: int = 1) -> None:
        self.tokens = tokens
        """All sequences end to end, (sum of lengths,)."""
        self.labels = labels
        """(R,), or (R, M) where a row has M outputs."""
        self.documents = documents
        self.sequence_lengths = np.diff(offsets)
        """True lengths of all sequences, (R N,)."""
        self.lengths = self.sequence_lengths.reshape(-1, documents).max(axis=1)
        """Length of the longest document of each row, (R,)."""
        self._starts = offsets[:-1]

    def __len__(self) -> int:
        return len(self.labels)

    def row(self, i: int) -> np.ndarray:
        """Tokens of row ``i``, its documents end to end, int64."""
        return self.flat(i, i + 1).astype(np.int64)

    def flat(self, start: int, stop: int) -> np.ndarray:
        """Tokens of rows ``start`` to ``stop`` (excluded) end to end, in the type on disk."""
        first, last = start * self.documents, stop * self.documents - 1
        return np.asarray(self.tokens[self._starts[first] : self._starts[last] + self.sequence_lengths[last]])

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (B N, longest of these) int64, padded on the right with 0, and true lengths (B N,).

        The documents of a row follow one another.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if self.documents > 1:
            indices = (indices[:, None] * self.documents + np.arange(self.documents)).ravel()
        lengths = self.sequence_lengths[indices]
        # a view without the memory map's subclass, whose slices cost a microsecond each
        tokens = np.asarray(self.tokens)
        padded = np.zeros((len(indices), lengths.max(initial=0)), np.int64)
        for row, start, length in zip(padded, self._starts[indices].tolist(), lengths.tolist()):
            row[:length] = tokens[start : start + length]
        return padded, lengths


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses while writing ``path`` into a message with the way out."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free space, get permission or choose another data folder"
        ) from error


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the right to prepare ``folder``; waits for another process that has it. Ends with the process."""
    lock = folder.with_name(f".{folder.name}.lock")
    with _writing(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _locked(lock, folder)
    with file:
        try:
            yield
        finally:
            # still held, so nobody else's; one that cannot be removed does no harm
            with suppress(OSError):
                lock.unlink()


def _locked(lock: Path, folder: Path) -> TextIO:
    """The file ``lock``, held by this process alone."""
    while True:
        file = lock.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        # who held it has removed it: others would lock a new one beside it
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        file.close()


@dataclass
class _SplitFiles:
    """Open files of a split under construction, with what the manifest will say of them."""

    files: dict[str, BinaryIO]
    hashes: dict[str, Any]
    lengths: list[np.ndarray] = field(default_factory=list)
    labels: Counter = field(default_factory=Counter)
    tokens: int = 0


class Writer:
    """Context manager that builds ``folder`` block by block; on any error nothing of it remains.

    Call it under ``exclusive(folder)``: what an interrupted predecessor left is deleted.
    """

    def __init__(self, folder: Path, identity: Identity, layout: Layout = Layout()) -> None:
        self.folder = folder
        self.identity = identity
        self.layout = layout
        self.details: dict[str, Any] = {}
        """Findings to record in the manifest besides the parameters."""
        self._dtypes = {"tokens": layout.token_dtype, "offsets": "<i8", "labels": "<i8"}
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._splits: dict[str, _SplitFiles] = {}

    def __enter__(self) -> "Writer":
        with _writing(self._partial):
            if self._partial.exists():
                log.info("removing what an interrupted run left in %s", self._partial)
                shutil.rmtree(self._partial)
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for split in self._splits.values():
                for file in split.files.values():
                    # unbuffered, so nothing is left that could fail to be written
                    file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def append(self, split: str, tokens: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> None:
        """Add rows: ``tokens`` (sum of lengths,) end to end, ``lengths`` (R N,), ``labels`` (R,) or (R, M)."""
        largest = np.iinfo(self._dtypes["tokens"]).max
        if (
            len(lengths) != len(labels) * self.layout.documents
            or labels.shape[1:] != ((self.layout.outputs,) if self.layout.outputs else ())
            or lengths.sum() != len(tokens)
            or lengths.min(initial=1) < 1
        ):
            raise ValueError(f"{len(tokens)} tokens and labels {labels.shape} do not match {len(lengths)} lengths")
        if len(tokens) and (tokens.min() < 0 or tokens.max() > largest):
            raise ValueError(f"token ids {tokens.min()}..{tokens.max()} do not fit 0..{largest}")
        state = self._splits.get(split) or self._open(split)
        self._write(split, "tokens", tokens)
        self._write(split, "offsets", state.tokens + np.cumsum(lengths))
        self._write(split, "labels", labels)
        state.tokens += len(tokens)
        state.lengths.append(np.array(lengths))
        state.labels.update(labels.ravel().tolist())

    def _open(self, split: str) -> _SplitFiles:
        with _writing(self._partial):
            files = {part: (self._partial / f"{split}.{part}.bin").open("wb", buffering=0) for part in PARTS}
        self._splits[split] = _SplitFiles(files, {part: hashlib.sha256() for part in PARTS})
        self._write(split, "offsets", np.zeros(1, np.int64))
        return self._splits[split]

    def _write(self, split: str, part: str, array: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(array, dtype=self._dtypes[part])).cast("B")
        state = self._splits[split]
        state.hashes[part].update(data)
        with _writing(self.folder):
            # an unbuffered write may take only a part, on a full disk for one
            while data:
                data = data[state.files[part].write(data) :]

    def _finish(self) -> None:
        manifest = {
            "format": FORMAT,
            "task": self.identity.task,
            "version": self.identity.version,
            "parameters": self.identity.parameters,
            "layout": asdict(self.layout),
            "details": self.details,
            "splits": {name: self._describe(split) for name, split in self._splits.items()},
        }
        with _writing(self.folder):
            (self._partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            os.rename(self._partial, self.folder)

    def _describe(self, split: _SplitFiles) -> dict[str, Any]:
        return {
            **describe(np.concatenate(split.lengths), split.labels, self.layout.documents),
            "files": {
                part: {
                    "dtype": self._dtypes[part],
                    "bytes": split.files[part].tell(),
                    "sha256": split.hashes[part].hexdigest(),
                }
                for part in PARTS
            },
        }


def describe(lengths: np.ndarray, labels: Counter, documents: int = 1) -> dict[str, Any]:
    """Counts and quantiles of a split of sequences with ``lengths`` (R N,), as the manifest records them."""
    quantiles = {"min": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1}
    return {
        "rows": len(lengths) // documents,
        "tokens": int(lengths.sum()),
        "labels": {str(label): labels[label] for label in sorted(labels)},
        "lengths": {name: float(np.quantile(lengths, q)) for name, q in quantiles.items()},
    }


def row_hashes(tokens: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    """128-bit hash of each of the rows that lie end to end in ``tokens``."""
    data = memoryview(np.ascontiguousarray(tokens)).cast("B")
    ends = (np.cumsum(lengths) * tokens.itemsize).tolist()
    return [hashlib.blake2b(data[a:b], digest_size=16).digest() for a, b in zip([0, *ends], ends)]


def read(folder: Path, identity: Identity, layout: Layout = Layout()) -> tuple[dict[str, Any], dict[str, Split]]:
    """The manifest and the splits of ``folder``; ``UserError`` unless it is what ``identity`` and ``layout`` say."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder} does not exist or may not be read; run `{identity.command}`")
    try:
        manifest = _read_manifest(folder / MANIFEST, identity, layout)
        splits = {name: _read_split(folder, name, manifest["splits"][name]["files"], layout) for name in SPLITS}
        return manifest, splits
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / MANIFEST}: expected rows and files of {', '.join(SPLITS)}, found none ({error}); "
            f"delete or move {folder}, then run `{identity.command}`"
        ) from None
    except _Broken as error:
        raise UserError(f"{error}; delete or move {folder}, then run `{identity.command}`") from None


class _Broken(Exception):
    """What is wrong with a prepared folder."""

    def __init__(self, path: Path, expected: object, found: object) -> None:
        super().__init__(f"{path}: expected {expected}, found {found}")


def _refused(path: Path, error: PermissionError) -> UserError:
    """Nothing says that the file is damaged, so that it need not be made again."""
    return UserError(f"{path}: cannot be read ({error.strerror}); fix the permissions of the file and its folders")


def _read_manifest(path: Path, identity: Identity, layout: Layout) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise _Broken(path, "a manifest", "no file")
        manifest = json.loads(path.read_text())
    except PermissionError as error:
        raise _refused(path, error) from None
    except OSError as error:
        raise _Broken(path, "a manifest", error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise _Broken(path, "JSON", f"text that does not parse ({error})") from None
    keys = ("format", "task", "version", "parameters", "layout", "details", "splits")
    found = manifest if isinstance(manifest, dict) else {}
    if found.get("format", FORMAT) != FORMAT:
        raise _Broken(path, f"format {FORMAT}", f"format {found['format']} of another version of this program")
    if missing := [key for key in keys if key not in found]:
        raise _Broken(path, f"the keys {', '.join(keys)}", f"none of {', '.join(missing)}")
    for key in ("details", "splits"):
        if not isinstance(found[key], dict):
            raise _Broken(path, f"an object as {key}", f"{found[key]!r:.40}")
    for key, expected in (
        *((key, getattr(identity, key)) for key in ("task", "version", "parameters")),
        ("layout", asdict(layout)),
    ):
        if found[key] != expected:
            raise _Broken(path, f"{key} {expected}", found[key])
    return found


def _read_split(folder: Path, name: str, files: dict[str, dict[str, Any]], layout: Layout) -> Split:
    arrays = {}
    for part in PARTS:
        path = folder / f"{name}.{part}.bin"
        dtype = files[part]["dtype"]
        _check_bytes(path, files[part]["bytes"], files[part]["sha256"])
        if dtype not in (TOKEN_DTYPES if part == "tokens" else ("<i8",)):
            raise _Broken(folder / MANIFEST, f"an integer type for {path.name}", dtype)
        arrays[part] = np.memmap(path, dtype, "r") if part == "tokens" else np.fromfile(path, dtype)
    tokens, offsets, labels = (arrays[part] for part in PARTS)
    if len(labels) % max(layout.outputs, 1):
        raise _Broken(folder / f"{name}.labels.bin", f"{layout.outputs} labels a row", f"{len(labels)} labels")
    labels = labels.reshape(-1, layout.outputs) if layout.outputs else labels
    if len(offsets) != len(labels) * layout.documents + 1:
        expected = f"{len(labels) * layout.documents + 1} offsets for the labels"
        raise _Broken(folder / f"{name}.offsets.bin", expected, len(offsets))
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 1).any():
        raise _Broken(folder / f"{name}.offsets.bin", f"offsets rising from 0 to {len(tokens)}", "others")
    return Split(tokens, offsets, labels, layout.documents)


def _check_bytes(path: Path, size: int, sha256: str) -> None:
    try:
        found = path.stat().st_size
        if found != size:
            raise _Broken(path, f"{size} bytes", found)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError as error:
        raise _refused(path, error) from None
    except OSError as error:
        raise _Broken(path, f"a file of {size} bytes", error.strerror) from None
    if digest != sha256:
        raise _Broken(path, f"sha256 {sha256[:12]}...", f"{digest[:12]}...")
