"""Data sets of the Hugging Face Hub: from a folder, a local mirror, the Hub's cache, or the Hub itself.

Rows are read in the order of the files, a block at a time. The only file that imports ``datasets``.
"""

import glob
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyarrow import types

from lra.errors import UserError

FOLDERS = ("", "data", "plain_text")
"""Where parquet files lie below the root of a data set, as the Hub and its mirrors have them."""
SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")
REACH_SECONDS = 5
"""After so long without an answer the Hub counts as out of reach; its own library would retry for 25 s."""
KINDS = {
    "text": lambda kind: types.is_string(kind) or types.is_large_string(kind),
    "label": types.is_integer,
    "image": lambda kind: types.is_struct(kind) and kind.get_field_index("bytes") >= 0,
}
UNREADABLE = (OSError, ValueError, pyarrow.ArrowException)
"""What damaged parquet files raise."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table:
    """The rows of one split."""

    paths: tuple[Path, ...]
    columns: dict[str, str]
    rows: int
    root: Path
    """The data set's folder, on which ``files`` are named."""

    @property
    def files(self) -> dict[str, Path]:
        """The files read, by their names below the data set's folder."""
        return {path.relative_to(self.root).as_posix(): path for path in self.paths}

    def batches(self, size: int) -> Iterator[dict[str, list]]:
        """Columns of up to ``size`` rows after another; images are encoded bytes as in the file.

        Raises ``UserError`` for a file that cannot be read and for a row that lacks a value.
        """
        import datasets

        # it logs what it raises as well, and one line is enough
        logging.getLogger("datasets").setLevel(logging.CRITICAL)
        kinds = {
            "text": datasets.Value("string"),
            "label": datasets.Value("int64"),
            "image": datasets.Image(decode=False),
        }
        row = 0
        try:
            rows = datasets.load_dataset(
                "parquet",
                data_files={"rows": [glob.escape(str(path)) for path in self.paths]},
                split="rows",
                columns=list(self.columns),
                features=datasets.Features({name: kinds[kind] for name, kind in self.columns.items()}),
                batch_size=size,
                streaming=True,
            )
            for batch in rows.iter(size):
                for name, kind in self.columns.items():
                    if kind == "image":
                        batch[name] = [image and image["bytes"] for image in batch[name]]
                    if None in batch[name]:
                        raise UserError(
                            f"{self.paths[0].parent}: expected a value in column {name} of every row, "
                            f"found none in row {row + batch[name].index(None)}; get the files again"
                        )
                yield batch
                row += len(batch[name])
        except UserError:
            raise
        except UNREADABLE as error:
            raise UserError(
                f"{', '.join(map(str, self.paths))}: cannot read the rows after {row} of {self.rows} "
                f"({_first_line(error)}); get the file again"
            ) from error


def load(
    repo: str,
    revision: str,
    columns: dict[str, str],
    *,
    source: str,
    data_dir: Path,
    splits: Iterable[str] = ("train", "test"),
) -> dict[str, Table]:
    """The ``splits`` of the data set ``repo``; ``columns`` gives each column's kind: text, label or image.

    ``source`` is ``hub`` or a folder in the Hub's layout. ``hub`` is the first of a mirror (see ``mirrors``), the
    cache of the Hub's library, and the Hub at ``revision``. Raises ``UserError`` if the files are not to be had
    or are not what is expected.
    """
    splits = tuple(splits)
    folder = locate(repo, revision, source=source, data_dir=data_dir, splits=splits)
    if folder is None:
        folder = _fetch(repo, revision, data_dir, splits)
    if not any(_paths(folder, split) for split in splits) and (inside := _inside(folder, repo, splits)):
        raise UserError(f"{folder}: {repo} lies deeper in it; name its own folder: task.source={inside}")
    return {split: _open(folder, split, columns) for split in splits}


def _inside(folder: Path, repo: str, splits: Iterable[str]) -> Path | None:
    """The folder of ``repo`` at or below one of a mirror of the Hub; None if it does not lie there."""
    owner, name = repo.split("/")
    places = (folder / name, folder / owner / name, folder / "hub" / owner / name)
    return next((place for place in places if all(_paths(place, split) for split in splits)), None)


def mirrors(repo: str, data_dir: Path) -> list[Path]:
    """Folders that stand for the data set ``repo`` of the Hub if they exist, first choice first."""
    named = os.environ.get("LRA_HUB_DIR")
    return [Path(folder) / repo for folder in ([named] if named else []) + [Path(data_dir) / "hub"]]


def locate(
    repo: str, revision: str, *, source: str, data_dir: Path, splits: Iterable[str] = ("train", "test")
) -> Path | None:
    """The folder of this machine that ``load`` would read; None if only the Hub has the files. No network."""
    if source != "hub":
        return Path(source)
    for folder in mirrors(repo, data_dir):
        if folder.is_dir():
            return folder
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(**_request(repo, revision, splits), local_files_only=True))
    except OSError:
        return None
    # the cache has the folder as soon as one file is in it
    return folder if all(_paths(folder, split) for split in splits) else None


def _request(repo: str, revision: str, splits: Iterable[str]) -> dict[str, Any]:
    patterns = [f"*{split}{end}" for split in splits for end in ("-*.parquet", ".parquet", "/*.parquet")]
    return {"repo_id": repo, "repo_type": "dataset", "revision": revision, "allow_patterns": patterns}


def _fetch(repo: str, revision: str, data_dir: Path, splits: Iterable[str]) -> Path:
    """Download into the cache of the Hub's library."""
    import huggingface_hub

    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    try:
        if os.environ.get("HF_DATASETS_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise ConnectionError("HF_DATASETS_OFFLINE is set")
        # one question without retries: without a network it fails at once, or in REACH_SECONDS
        huggingface_hub.HfApi().dataset_info(repo, revision=revision, timeout=REACH_SECONDS)
        log.info("downloading %s at %s from the Hub", repo, revision)
        return Path(huggingface_hub.snapshot_download(**_request(repo, revision, splits)))
    except Exception as error:  # the HTTP library, so the class of its errors, differs between versions
        wanted = mirrors(repo, data_dir)[-1]
        raise UserError(
            f"{repo} is not on this machine, and the Hub does not give it ({_first_line(error)}); put its "
            f"{' and '.join(f'{split}-*.parquet' for split in splits)} into {wanted}, or their folder below "
            f"$LRA_HUB_DIR as {repo}, or name it: task.source=FOLDER. With a network: "
            f"`hf download {repo} --repo-type dataset --revision {revision} --local-dir {wanted}`"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _paths(folder: Path, split: str) -> list[Path]:
    """The parquet files of ``split``, in order; none if the folder lacks them."""
    for below in FOLDERS:
        for pattern in (f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet"):
            if found := sorted((folder / below).glob(pattern)):
                return found
    return []


def _open(folder: Path, split: str, columns: dict[str, str]) -> Table:
    paths = _paths(folder, split)
    if not paths:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) if folder.is_dir() else "no such folder"
        raise UserError(
            f"{folder}: expected {split}-*.parquet in it, in data/ or in plain_text/, found {found or 'nothing'}; "
            "put the data set's parquet files there"
        )
    shards = [match.groups() for path in paths if (match := SHARD.search(path.name))]
    expected = int(shards[0][1]) if shards else len(paths)
    if len(paths) != expected or shards and [int(number) for number, _ in shards] != list(range(expected)):
        raise UserError(
            f"{paths[0].parent}: expected {expected} files {split}-*.parquet, as their names say, "
            f"found {', '.join(path.name for path in paths)}; get all of one version"
        )
    rows = sum(_check(path, columns) for path in paths)
    if not rows:
        raise UserError(f"{paths[0]}: expected rows in split {split}, found none; get the file again")
    return Table(tuple(paths), columns, rows, folder)


def _check(path: Path, columns: dict[str, str]) -> int:
    """Number of rows of a file that has the columns."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except UNREADABLE as error:
        found = _first_line(error)
        if path.is_file() and path.read_bytes()[:100].startswith(b"version https://git-lfs"):
            found = "a Git LFS pointer: run `git lfs pull` where it was cloned"
        raise UserError(f"{path}: expected a parquet file, found none ({found}); get the file again") from error
    for name, kind in columns.items():
        if schema.names.count(name) > 1:
            raise UserError(f"{path}: expected one column {name}, found {schema.names.count(name)}; get the file again")
        found = schema.field(name).type if name in schema.names else None
        if found is None or not KINDS[kind](found):
            raise UserError(
                f"{path}: expected a column {name} of kind {kind}, "
                f"found {f'{name} of type {found}' if found else ', '.join(schema.names)}; name another data set"
            )
    return rows


def plain_rows(columns: dict[str, list]) -> Any:  # noqa: ANN401  a datasets.Dataset
    """The columns as a data set in memory, for the comparison of ``lra.bench_loader`` with a loop over such a one."""
    import datasets

    return datasets.Dataset.from_dict(columns)
