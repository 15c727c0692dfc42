"""Generated images in files of one chunk each, so that an interrupted preparation goes on where it was."""

import io
import logging
import shutil
from pathlib import Path

import numpy as np

from lra.errors import UserError
from lra.results import write_atomic
from lra.tasks.pathfinder_generator import Parameters, generate

log = logging.getLogger(__name__)


class Shards:
    """Chunks of images below a hidden folder beside ``folder``; it goes when the block ends without an exception."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.with_name(f".{folder.name}.shards")

    def __enter__(self) -> "Shards":
        found = len(list(self._folder.glob("*.npy")))
        if found:
            log.info("going on after %d chunks of an interrupted run", found)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        elif kept := list(self._folder.glob("*.npy")):
            size = sum(path.stat().st_size for path in kept) / 2**20
            log.warning(
                "%s keeps %.1f MiB of finished images: the same command goes on after them; or delete it",
                self._folder,
                size,
            )

    def get(self, parameters: Parameters, seed: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 (count, S, S) and labels uint8 (count,) from ``start`` on, generated unless they are there."""
        path = self._folder / f"{start}-{count}.npy"
        pixels = parameters.size**2
        packed = self._load(path, (count, pixels + 1))
        if packed is None:
            samples = generate(parameters, seed, start, count)
            packed = np.column_stack([samples.images.reshape(count, pixels), samples.labels])
            self._save(path, packed)
        return packed[:, :-1].reshape(count, parameters.size, parameters.size), packed[:, -1]

    @staticmethod
    def _load(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return found if found.shape == shape and found.dtype == np.uint8 else None

    @staticmethod
    def _save(path: Path, packed: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.save(buffer, packed)
        try:
            write_atomic(path, buffer.getvalue())
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror or error}; free space or choose another data folder"
            ) from error
