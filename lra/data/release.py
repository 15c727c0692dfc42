"""The archive of the Long Range Arena release, as the bucket has it or as somebody unpacked it.

The bucket's ``lra_release.gz`` is a tar.gz of ``lra_release/``, in which a second ``lra_release/`` lies that has all
tasks; two tasks are in both. The inner copy is taken, as other harnesses do: of the outer ``pathfinder128`` it is
doubted that it can be learnt (google-research/long-range-arena, issue 38).
"""

import gzip
import hashlib
import logging
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from lra.data import arrays
from lra.errors import UserError

ROOT = "lra_release"
ARCHIVES = (f"{ROOT}.gz", f"{ROOT}.tar.gz")
FOLDERS = ("listops-1000", "tsv_data", "pathfinder32", "pathfinder64", "pathfinder128", "pathfinder256")
"""Of the tasks that the release has."""
NESTING = 3
"""Folders named ``lra_release`` that may lie in one another: two, and one that an archive was unpacked in."""
UNPACKED = "unpacked"
"""Folder below ``data_dir`` for what is taken out of archives."""

log = logging.getLogger(__name__)


def find(data_dir: Path, name: str | None = None) -> Path | None:
    """The release below ``data_dir``: the folder ``lra_release``, or the archive. None if neither is there.

    With ``name``, a folder counts only if it has the folder of that task; an archive is not opened.
    """
    folder = Path(data_dir) / ROOT
    if folder.is_dir() and (name is None or _inside(folder, name)):
        return folder
    return next((path for path in (Path(data_dir) / archive for archive in ARCHIVES) if path.is_file()), None)


def folder(source: str | Path, name: str, data_dir: Path, *, unpack: bool = True) -> Path:
    """The folder ``name`` (``listops-1000``, ``tsv_data``, ``pathfinder32``, ...) of a release.

    ``source`` is ``release`` for what ``find`` finds, a release's folder at any of its levels, that task's folder
    itself, or the archive; of an archive the folder is unpacked below ``data_dir``, once, and without ``unpack`` only
    looked for there. ``UserError`` if it has no such folder or is cut short. A folder that holds no release is taken
    to be the task's: its reader checks the files.
    """
    if source == "release":
        source = find(data_dir, name) or find(data_dir)
        if source is None:
            raise UserError(
                f"task.source=release: expected LRA's release in {data_dir}, found none; put the file {ARCHIVES[0]} of "
                f"the bucket long-range-arena (about 8 GB) there, or what it unpacks to as {Path(data_dir) / ROOT}, "
                "or name the place with task.source="
            )
    source = Path(source)
    if source.is_file():
        return _unpacked(source, name, Path(data_dir), unpack)
    if not source.is_dir():
        raise UserError(f"task.source={source}: expected a folder or {ARCHIVES[0]}, found neither; correct the path")
    if found := _inside(source, name):
        return found
    if (source / ROOT).is_dir() or any((source / other).is_dir() for other in FOLDERS):
        raise UserError(
            f"task.source={source}: expected the folder {name} of LRA's release in it, found none; "
            f"unpack {name} of {ARCHIVES[0]} there, or name the archive itself with task.source="
        )
    return source


def _inside(source: Path, name: str) -> Path | None:
    """Folder ``name`` in the innermost ``lra_release`` at or below ``source`` that has it."""
    levels = [source.joinpath(*[ROOT] * depth, name) for depth in reversed(range(NESTING))]
    return next((level for level in levels if level.is_dir()), None)


def _unpacked(archive: Path, name: str, data_dir: Path, unpack: bool) -> Path:
    """Folder ``name`` of ``archive`` below ``data_dir``."""
    state = archive.stat()
    key = hashlib.sha256(f"{archive.absolute()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:8]
    target = data_dir / UNPACKED / f"{archive.name.partition('.')[0]}-{key}" / name
    if target.is_dir():
        return target
    if not unpack:
        raise UserError(f"{archive}: {name} is not unpacked in {target}; prepare the task's data, which does it")
    with arrays.exclusive(target):
        # another process may have done it meanwhile
        if not target.is_dir():
            _unpack(archive, name, target)
    return target


def _unpack(archive: Path, name: str, target: Path) -> None:
    """Fill ``target`` with folder ``name`` of ``archive``; on any error nothing of it remains."""
    log.info("unpacking %s of %s to %s; the whole archive has to be read", name, archive, target)
    partial = target.with_name(f".{name}.partial")
    # what a killed process left
    shutil.rmtree(partial, ignore_errors=True)
    try:
        depth = _extract(archive, name, partial)
        os.rename(partial / str(depth), target)
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise UserError(
            f"{archive}: expected a complete tar.gz of {archive.stat().st_size} bytes, found that it is damaged or cut "
            f"short ({error}); download it again, {ARCHIVES[0]} has about 8 GB"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot unpack {archive} to {target}: {error.strerror or error}; free space, get permission or choose "
            "another data_dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(archive: Path, name: str, partial: Path) -> int:
    """Write the files below each folder ``name`` to ``partial``/<depth>; returns the greatest depth there is."""
    deepest = -1
    with _stream(archive) as (tar, rest):
        while member := tar.next():
            # else it keeps all of the about a million members
            tar.members.clear()
            place = _place(member.name, name)
            if place is None or not member.isfile() or place[0] < deepest:
                continue
            deepest = place[0]
            if ".." in place[1].parts:
                raise UserError(f"{archive}: expected files below {name}, found {member.name!r}; do not use this file")
            tar.extract(member.replace(name=f"{deepest}/{place[1]}", deep=False), partial, filter="data")
        # only at its end gzip knows that the file is whole
        while rest.read(1 << 20):
            pass
    if deepest < 0:
        raise UserError(f"{archive}: expected the folder {name} of LRA's release in it, found none; get {ARCHIVES[0]}")
    return deepest


def _place(member: str, name: str) -> tuple[int, PurePosixPath] | None:
    """How many ``lra_release`` lie around the folder ``name`` that ``member`` is in, and its path there."""
    parts = PurePosixPath(member).parts
    depth = next((i for i, part in enumerate(parts) if part != ROOT), len(parts))
    if parts[depth : depth + 1] != (name,) or depth + 1 == len(parts):
        return None
    return depth, PurePosixPath(*parts[depth + 1 :])


@contextmanager
def _stream(archive: Path) -> Iterator[tuple[tarfile.TarFile, gzip.GzipFile]]:
    """The members of ``archive`` in the order of the file, and the uncompressed bytes beneath them."""
    size = archive.stat().st_size
    with (
        archive.open("rb") as file,
        tqdm.wrapattr(file, "read", total=size, desc=f"reading {archive.name}", disable=None) as watched,
        gzip.GzipFile(fileobj=watched) as raw,
        tarfile.open(fileobj=raw, mode="r|", bufsize=1 << 20) as tar,
    ):
        yield tar, raw
