"""The row of a run: how it begins, and what is written into it when the run ends, however it ends."""

import errno
import logging
from datetime import UTC, datetime
from pathlib import Path

from lra import results
from lra.config import RunConfig
from lra.environment import device_name, environment, git_state
from lra.evaluation import Score
from lra.memory_limit import OutOfMemory, is_out_of_memory
from lra.meter import allocator
from lra.results import ResultRow
from lra.run_dir import CHECKPOINTS
from lra.stats import is_stuck, wilson
from lra.tasks.base import TaskInfo

log = logging.getLogger("lra")


def new_row(config: RunConfig, info: TaskInfo | None = None) -> ResultRow:
    """The row of a run that has not ended; without ``info`` it says nothing of the data."""
    return ResultRow(
        run_id=config.run_id,
        status="interrupted",
        error="the run has not ended",
        resumable=True,
        task=config.task.name,
        task_version=info and info.version,
        attention=config.attention.name,
        seed=config.seed,
        length=config.task.length,
        regime=config.regime,
        config_hash=config.fingerprint(),
        protocol_hash=config.protocol_fingerprint(),
        attention_hash=config.mixer_fingerprint(),
        protocol=", ".join([config.trainer.name, *config.trainer.budget()]),
        batch_size=config.trainer.batch_size,
        fidelity=config.task.fidelity,
        data_source=info and info.source,
        rows=dict(info.splits) if info else {},
        lengths=info.lengths if info else {},
        warnings=list(info.warnings) if info else [],
        majority_baseline=info and info.majority_baseline,
        direction="causal" if config.attention.causal else "bidirectional",
        dtype=config.trainer.precision,
        device=config.device,
        device_name=device_name(config.device),
        environment={**environment(), "allocator": allocator()},
        git=git_state(),
        started=_now(),
    )


def judge(row: ResultRow, test: Score) -> None:
    """Enter what the test split said; with it the run has ended well."""
    row.test_accuracy, row.test_labels, row.test_loss = test.accuracy, test.labels, test.loss
    row.test_per_class, row.test_calibration_error = test.per_class, test.calibration_error
    row.test_interval = list(wilson(test.correct, test.labels))
    row.error, row.resumable = None, False
    row.status = "stuck" if is_stuck(test.correct, test.labels, row.majority_baseline) else "ok"


def finish(row: ResultRow, run_dir: Path, error: BaseException | None = None) -> None:
    """Enter how the run ended and write the row."""
    if error is not None:
        _close_row(row, error)
    row.resumable = row.resumable and any((run_dir / CHECKPOINTS).glob("step-*.pt"))
    row.finished = _now()
    results.save(row, run_dir)


def _close_row(row: ResultRow, error: BaseException) -> None:
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    row.resumable = isinstance(error, KeyboardInterrupt) or full
    if isinstance(error, KeyboardInterrupt):
        row.status, row.error = "interrupted", "stopped by the user or by SIGTERM"
    elif is_out_of_memory(error):
        row.status, row.error = "oom", first_line
        if isinstance(error, OutOfMemory):
            row.oom_rows, row.oom_length = error.rows, error.length
    elif full:
        row.status, row.error = "failed", f"cannot write ({error.strerror}); free space, or give another runs_dir=..."
    else:
        row.status, row.error = "failed", f"{type(error).__name__}: {first_line}"


def report_failure(row: ResultRow, error: BaseException, run_dir: Path) -> None:
    """Tell people; what is no exception of the run's own goes on."""
    if isinstance(error, KeyboardInterrupt):
        if row.resumable:
            log.warning("interrupted; the same command, or `lra resume %s`, goes on from the last checkpoint", run_dir)
        else:
            log.warning("interrupted before the first checkpoint; the same command starts again")
    elif isinstance(error, Exception):
        log.debug("traceback", exc_info=error)
        log.error("%s: %s (traceback in %s)", row.status, row.error, run_dir / "train.log")
    else:
        raise error


def outcome(row: ResultRow) -> str:
    """One line for people."""
    low, high = (100 * x for x in row.test_interval)
    speed = "no step timed" if row.step_ms is None else f"{row.step_ms:.0f} ms/step"
    text = (
        f"{row.attention} on {row.task}@{row.length}: test accuracy {100 * row.test_accuracy:.1f} % "
        f"[{low:.1f}, {high:.1f}], majority {100 * row.majority_baseline:.1f} %, {speed}"
    )
    return text if row.status == "ok" else f"{text}: {row.status.upper()}, not above the majority class"


def summary(row: ResultRow) -> dict[str, object]:
    """What a tracker shows of a run that ended well."""
    return {
        "status": row.status,
        "val/accuracy": row.validation_accuracy,
        "test/accuracy": row.test_accuracy,
        "perf/train_seconds": row.train_seconds,
        "perf/step_ms": row.step_ms,
        "perf/tokens_per_second": row.tokens_per_second,
        "perf/peak_mem_gib": None if row.peak_memory_bytes is None else row.peak_memory_bytes / 2**30,
        "kernel": row.kernel,
        "parameters": row.parameters,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
