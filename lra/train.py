"""One run, from a configuration to a result row: ``lra train`` and ``python -m lra.train``."""

import errno
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

import lra.tasks
from attention import kernels
from attention import load as load_mixer
from lra import results
from lra.config import COMPOSITION_ERRORS, HYDRA_VERSION_BASE, RunConfig, conf_dir, describe, register, resolve
from lra.data.arrays import Split
from lra.environment import device_name, environment, git_state
from lra.errors import UserError
from lra.meter import Meter, allocator, tune_allocator
from lra.results import ResultRow
from lra.stats import is_stuck, wilson
from lra.tasks.base import TaskInfo
from lra.tracking import Tracker
from lra.trainer import Score, Trainer, parameter_count
from models import build_model

EXIT_CODES = {"ok": 0, "stuck": 0, "failed": 1, "oom": 1, "interrupted": 130}
REPLACED, LOCKS = ".replaced", ".locks"
"""Below ``runs_dir``, hidden from the table."""

log = logging.getLogger("lra")


def run(config: RunConfig) -> ResultRow:
    """Train, select on validation, test once. The row is on disk when this returns, whatever happened."""
    info, splits = lra.tasks.load(config.task.name).load(config.task, Path(config.data_dir))
    row = new_row(config, info)
    with only_process(config), _log_file(fresh_dir(config)), terminate_as_interrupt():
        run_dir = config.run_dir
        log.info("%s", config.run_dir)
        try:
            with Tracker(config, run_dir) as tracker:
                try:
                    _train_and_test(config, info, splits, row, tracker, run_dir)
                except BaseException as error:
                    _close_row(row, error)
                    raise
                finally:
                    row.finished = _now()
                    results.save(row, run_dir)
                tracker.summary(_summary(row))
        except BaseException as error:
            if row.finished is None:  # stopped before the training began
                _close_row(row, error)
                row.finished = _now()
                results.save(row, run_dir)
            _report_failure(row, error, run_dir)
        else:
            log.info("%s", outcome(row))
            for warning in row.warnings:
                log.warning("note: %s", warning)
    return row


def _report_failure(row: ResultRow, error: BaseException, run_dir: Path) -> None:
    if isinstance(error, KeyboardInterrupt):
        log.warning("interrupted; the same command starts the run again")
    elif isinstance(error, Exception):
        log.debug("traceback", exc_info=error)
        log.error("%s: %s (traceback in %s)", row.status, row.error, run_dir / "train.log")
    else:
        raise error


def outcome(row: ResultRow) -> str:
    """One line for people."""
    low, high = (100 * x for x in row.test_interval)
    text = (
        f"{row.attention} on {row.task}@{row.length}: test accuracy {100 * row.test_accuracy:.1f} % "
        f"[{low:.1f}, {high:.1f}], majority {100 * row.majority_baseline:.1f} %, {row.step_ms:.0f} ms/step"
    )
    return text if row.status == "ok" else f"{text}: {row.status.upper()}, not above the majority class"


def _train_and_test(
    config: RunConfig,
    info: TaskInfo,
    splits: dict[str, Split],
    row: ResultRow,
    tracker: Tracker,
    run_dir: Path,
) -> None:
    device = torch.device(config.device)
    seeds = np.random.SeedSequence(config.seed).generate_state(2)
    torch.manual_seed(int(seeds[0]))
    meter = Meter(device, warmup_steps=config.trainer.timing_warmup)
    model = build_model(
        config.model,
        config.attention,
        **info.network(),
    )
    row.parameters = parameter_count(model)
    trainer = Trainer(
        model,
        splits,
        config.trainer,
        device=device,
        meter=meter,
        tracker=tracker,
        run_dir=run_dir,
        data_seed=int(seeds[1]),
    )
    op = load_mixer(config.attention.name).op
    try:
        trainer.fit()
        row.kernel = kernels.last_used(op)
    finally:
        if trainer.best:
            row.validation_accuracy, row.selected_step = trainer.best.accuracy, trainer.best_step
        meter.close_training_window()
        for key, value in meter.report().items():
            setattr(row, key, value)
        row.epochs = trainer.epochs(row.steps)
    with meter.evaluation():
        score = trainer.evaluate("test")
    row.seconds = meter.report()["seconds"]
    _judge(row, score)
    tracker.log(row.steps, {"test/accuracy": score.accuracy, "test/loss": score.loss})


def _judge(row: ResultRow, test: Score) -> None:
    row.test_accuracy, row.test_labels = test.accuracy, test.labels
    row.test_interval = list(wilson(test.correct, test.labels))
    row.error = None
    row.status = "stuck" if is_stuck(test.correct, test.labels, row.majority_baseline) else "ok"


def new_row(config: RunConfig, info: TaskInfo | None = None) -> ResultRow:
    """The row of a run that has not ended; without ``info`` it says nothing of the data."""
    return ResultRow(
        run_id=config.run_id,
        status="interrupted",
        error="the run has not ended",
        task=config.task.name,
        task_version=info and info.version,
        attention=config.attention.name,
        seed=config.seed,
        length=config.task.length,
        regime=config.regime,
        config_hash=config.fingerprint(),
        protocol_hash=config.fingerprint(without=("attention", "seed")),
        attention_hash=config.mixer_fingerprint(),
        protocol=config.trainer.name,
        batch_size=config.trainer.batch_size,
        fidelity=config.task.fidelity,
        data_source=info and info.source,
        rows=dict(info.splits) if info else {},
        lengths=info.lengths if info else {},
        warnings=list(info.warnings) if info else [],
        majority_baseline=info and info.majority_baseline,
        dtype=config.trainer.precision,
        device=config.device,
        device_name=device_name(config.device),
        environment={**environment(), "allocator": allocator()},
        git=git_state(),
        started=_now(),
    )


def _close_row(row: ResultRow, error: BaseException) -> None:
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    if isinstance(error, KeyboardInterrupt):
        row.status, row.error = "interrupted", "stopped by the user or by SIGTERM"
    elif isinstance(error, torch.OutOfMemoryError | MemoryError):
        row.status, row.error = "oom", first_line
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        row.status, row.error = "failed", f"cannot write ({error.strerror}); free space, or give another runs_dir=..."
    else:
        row.status, row.error = "failed", f"{type(error).__name__}: {first_line}"


def _summary(row: ResultRow) -> dict[str, object]:
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
def _log_file(run_dir: Path) -> Iterator[None]:
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


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: with a row."""

    def interrupt(signum: int, frame: object) -> None:
        # a second signal, sent to the whole group or by a dying parent, must not cut off the writing of the row
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def log_to_terminal() -> None:
    """Plain INFO lines on stderr."""
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(getattr(h, "lra_terminal", False) for h in log.handlers):
        handler = logging.StreamHandler()
        handler.setLevel(logging.INFO)
        handler.lra_terminal = True
        log.addHandler(handler)
        # the kernels tell when they are being built, or why they cannot be
        logging.getLogger("attention").setLevel(logging.INFO)
        logging.getLogger("attention").addHandler(handler)


def main() -> int:
    """Entry point; Hydra reads the overrides from ``sys.argv``. Returns the exit code."""
    log_to_terminal()
    tune_allocator()
    register()
    codes = []

    def job(config: DictConfig) -> None:
        # nothing but an interrupt leaves here as an exception: Hydra would add lines of its own to each
        try:
            status = run(resolve(config)).status
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            codes.append(2)
            return
        codes.append(EXIT_CODES[status])
        if status == "interrupted":
            raise KeyboardInterrupt

    # Hydra 1.3 takes -m only before or after all overrides
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    # with this set Hydra lets its own exceptions through, so that they too become one line of ours
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name="config")(job)()
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    except (*COMPOSITION_ERRORS, OSError) as error:
        print(f"error: {describe(error, sys.argv[1:])}", file=sys.stderr)
        return 2
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
