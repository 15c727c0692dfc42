"""Reading Pathfinder images from LRA's release: ``<set>/imgs/<k>/sample_<i>.png`` and ``<set>/metadata/<k>.npy``.

The metadata is text in spite of its name: a line an image, of which field 0 is the folder, 1 the file and 3 the label.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from lra.data import splits
from lra.errors import UserError

SETS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
"""Contours of 6, 9 and 14 paddles."""
KNOWN_BAD = "pathfinder32/curv_baseline/imgs/0/sample_172.png"
"""The one file of the release that is empty. Any other that cannot be read is an error."""
FIELDS = 4
RELEASED = 200_000


@dataclass(frozen=True)
class Record:
    """One line of the metadata."""

    path: Path
    label: int
    origin: str
    """File and line of the metadata."""

    @property
    def known_bad(self) -> bool:
        """Whether this is the empty file of the release."""
        return self.path.as_posix().endswith(KNOWN_BAD) and self.path.is_file() and not self.path.stat().st_size


def folder_name(side: int) -> str:
    """Folder of the release with images of ``side`` pixels."""
    return f"pathfinder{side}"


def difficulty_folder(folder: Path, difficulty: str) -> Path:
    """The set of ``difficulty`` in ``folder``, or ``folder`` if it is that set itself."""
    name = SETS[difficulty]
    for found in (folder / name, folder):
        if (found / "metadata").is_dir() and (found / "imgs").is_dir():
            return found
    raise UserError(
        f"{folder}: expected {name}/imgs and {name}/metadata in it, found neither; name the folder "
        f"pathfinder32, ..., or pathfinder256 of LRA's release"
    )


def metadata(source: Path) -> list[Path]:
    """The metadata files in the order of their numbers."""
    found = [path for path in (source / "metadata").glob("*.npy") if path.stem.isdigit()]
    if not found:
        raise UserError(f"{source / 'metadata'}: expected files 0.npy, 1.npy, ..., found none; get the whole set")
    for path in found:
        # a pipe would be waited for without end
        if not path.is_file():
            raise UserError(f"{path}: expected a file, found something else; get the whole set")
    return sorted(found, key=lambda path: int(path.stem))


def records(source: Path) -> list[Record]:
    """All images of a set in the order of the metadata, which the split ids count; ``UserError`` if there are none."""
    found = [record for path in metadata(source) for record in _lines(source, path)]
    if not found:
        raise UserError(f"{source / 'metadata'}: expected a line for every image, found none; get the whole set")
    return found


def _lines(source: Path, path: Path) -> list[Record]:
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        fields, origin = line.split(), f"{path}:{number}"
        if not fields:
            continue
        if len(fields) < FIELDS:
            raise UserError(f"{origin}: expected at least {FIELDS} fields, found {len(fields)}; restore the file")
        if fields[3] not in ("0", "1"):
            raise UserError(f"{origin}: expected a label 0 or 1 as field 4, found {fields[3]!r}; restore the file")
        relative = Path(fields[0]) / fields[1]
        if relative.is_absolute() or ".." in relative.parts:
            raise UserError(f"{origin}: expected a file below {source}, found {relative}; restore the file")
        found.append(Record(source / relative, int(fields[3]), origin))
    return found


def _text(path: Path) -> str:
    """The lines of a metadata file; the generator itself saves them as an array, the release as text."""
    data = path.read_bytes()
    if not data.startswith(b"\x93NUMPY"):
        return data.decode("utf-8", errors="replace")
    try:
        array = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise UserError(f"{path}: expected text or an array of text, found {error}; restore the file") from None
    return "\n".join(" ".join(map(str, row)) for row in np.atleast_2d(array))


def split_ids(rows: int, fidelity: str) -> dict[str, np.ndarray]:
    """Positions of each split among ``rows`` records: the published ids, or the same rule for another number."""
    if fidelity == "s4":
        return splits.s4_ids("pathfinder", rows)
    if rows == RELEASED:
        return splits.load("pathfinder")
    order = splits.ranked("pathfinder", rows)
    tenth = rows // 10
    parts = {"validation": order[:tenth], "test": order[tenth : 2 * tenth], "train": order[2 * tenth :]}
    return {name: np.sort(ids) for name, ids in parts.items()}


def images(chosen: list[Record], side: int) -> np.ndarray:
    """The pictures of ``chosen``, uint8 (N, side, side)."""
    found = np.empty((len(chosen), side, side), np.uint8)
    for i, record in enumerate(chosen):
        try:
            if record.path.exists() and not record.path.is_file():
                raise UserError(f"{record.path}: expected a file, found something else ({record.origin}); get it again")
            with Image.open(record.path) as picture:
                shape, mode = picture.size, picture.mode
                if shape != (side, side) or mode != "L":
                    raise UserError(
                        f"{record.path}: expected {side} x {side} pixels of 8 bits, found {shape[0]} x {shape[1]} of "
                        f"mode {mode} ({record.origin}); choose another task.length or get the file again"
                    )
                found[i] = np.asarray(picture)
        except FileNotFoundError:
            raise UserError(f"{record.path}: missing, but {record.origin} names it; get the file again") from None
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
            raise UserError(
                f"{record.path}: not a readable image ({error}; {record.origin}); get the file again"
            ) from None
    return found
