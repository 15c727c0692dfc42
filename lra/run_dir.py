"""The directory of a run: one process at a time, nothing lost, a log file."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from lra import results
from lra.config import RunConfig
from lra.errors import UserError

REPLACED, LOCKS = ".replaced", ".locks"
"""Below ``runs_dir``, hidden from the table."""
CHECKPOINTS = "checkpoints"

log = logging.getLogger("lra")


@contextmanager
def only_process(config: RunConfig) -> Iterator[None]:
    """Hold the run for this process: two of them must not write into one directory."""
    path = config.run_dir.parent / LOCKS / config.run_id
    with _writing(config):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{config.run_dir}: another process is at this run; wait for it, stop it, or give another runs_dir=..."
            ) from None
        yield


def open_dir(config: RunConfig) -> Path:
    """The run directory: as it is if an unfinished run of this configuration can go on in it, else a fresh one."""
    run_dir = config.run_dir
    try:
        resumable = results.load(run_dir / results.RESULT_FILE).resumable
    except (OSError, ValueError):
        resumable = True  # killed before it could write its row; the checkpoints say whether they are whole
    if config.resume == "auto" and resumable and any((run_dir / CHECKPOINTS).glob("step-*.pt")):
        return run_dir
    return fresh_dir(config)


def fresh_dir(config: RunConfig) -> Path:
    """Make the run directory with its ``config.yaml``; an earlier one of the same run is kept in ``.replaced``."""
    run_dir = config.run_dir
    with _writing(config):
        if run_dir.exists():
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            kept = run_dir.parent / REPLACED / f"{run_dir.name}-{stamp}"
            kept.parent.mkdir(exist_ok=True)
            run_dir.rename(kept)
            log.info("an earlier run of this configuration is kept in %s", kept)
        run_dir.mkdir(parents=True)
        results.write_atomic(run_dir / "config.yaml", config.yaml())
    return run_dir


@contextmanager
def _writing(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"runs_dir={config.runs_dir}: cannot write a run directory there ({error.strerror}); "
            f"free space or fix its permissions, or give another runs_dir=..."
        ) from None


@contextmanager
def log_file(run_dir: Path) -> Iterator[None]:
    """Copy the log of this run, tracebacks included, to its ``train.log``."""
    handler = logging.FileHandler(run_dir / "train.log")
    log.setLevel(logging.DEBUG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
