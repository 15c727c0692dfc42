"""Where a run's numbers go: ``metrics.jsonl`` first, always; W&B as a mirror that may fail.

The only file that imports wandb. A run gives the same numbers with tracking on, off or broken.
"""

import json
import logging
import math
import netrc
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lra import results
from lra.config import RunConfig

if TYPE_CHECKING:
    import wandb

STEP = "trainer/step"
METRICS_FILE = "metrics.jsonl"
INIT_TIMEOUT_SECONDS = 15
FINISH_TIMEOUT_SECONDS = 60

log = logging.getLogger(__name__)


def has_key() -> bool:
    """Whether W&B credentials are configured (environment or netrc)."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host or "coreweave" in host for host in hosts)


def wandb_mode(mode: str) -> tuple[str, str]:
    """What ``tracking.mode`` means here, and why: ``(online | offline | disabled, reason)``."""
    if mode != "auto":
        return mode, f"tracking.mode={mode}"
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"], "WANDB_MODE is set"
    if has_key():
        return "online", "a W&B key is configured"
    return "offline", "no W&B key is configured"


class NoTracker:
    """What the other ranks of a run log: nothing."""

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Nothing."""


class Tracker(NoTracker):
    """Logs of one run. Use as a context manager: an exception marks the W&B run as failed."""

    def __init__(self, config: RunConfig, run_dir: Path, *, resume_step: int | None = None) -> None:
        """``resume_step``: the step of the checkpoint from which the run goes on; later lines are dropped.

        W&B gets a new run with the kept lines replayed into it, in place of the offline one of the earlier process:
        its own resuming loses or repeats steps.
        """
        path = run_dir / METRICS_FILE
        kept = _lines_until(path, resume_step) if resume_step is not None else []
        results.write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        for earlier in (run_dir / "wandb").glob("offline-run-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        self._file = path.open("a")
        self._run = self._open_wandb(config, run_dir)
        for row in kept:
            self._mirror(lambda run, row=row: run.log(row))

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """One line of ``metrics.jsonl``, on disk before W&B sees it."""
        row = {STEP: step, **{k: _finite(v) for k, v in values.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._mirror(lambda run: run.log(row))

    def summary(self, values: dict[str, object]) -> None:
        """Final figures of the run."""
        self._mirror(lambda run: run.summary.update({k: v for k, v in values.items() if v is not None}))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._mirror(lambda run: run.finish(exit_code=0 if kind is None else 1))

    def _mirror(self, action: object) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # a mirror must never change a result
            log.warning("W&B stopped accepting data (%s); metrics.jsonl is complete", error)
            self._run = None

    def _open_wandb(self, config: RunConfig, run_dir: Path) -> "wandb.Run | None":
        mode, reason = wandb_mode(config.tracking.mode)
        if mode == "disabled":
            return None
        import wandb

        if mode == "online" and not has_key():
            log.warning("W&B: offline, because tracking.mode=online needs a key; run `wandb login` first")
            mode = "offline"
        if mode == "online":
            try:
                run = self._init(wandb, config, run_dir, mode)
            except (wandb.errors.Error, OSError) as error:
                reason = f"the server did not answer ({str(error).splitlines()[0]})"
                mode = "offline"
            else:
                log.info("W&B: online, %s", run.url)
                return run
        try:
            run = self._init(wandb, config, run_dir, mode)
        except Exception as error:
            log.warning("W&B: off, it could not start (%s)", error)
            return None
        log.info("W&B: offline, %s; upload with `wandb sync %s`", reason, run_dir / "wandb")
        return run

    @staticmethod
    def _init(wandb: object, config: RunConfig, run_dir: Path, mode: str) -> "wandb.Run":
        task, mixer = config.task, config.attention.name
        run = wandb.init(
            mode=mode,
            dir=run_dir,
            project=config.tracking.project,
            entity=config.tracking.entity,
            name=f"{task.name}-{mixer}-{task.length}-s{config.seed}",
            group=f"{task.name}/{task.length}/{mixer}",
            job_type="train",
            config=_flat(config),
            settings=wandb.Settings(
                silent=True,
                init_timeout=INIT_TIMEOUT_SECONDS,
                finish_timeout=FINISH_TIMEOUT_SECONDS,
                save_code=False,
            ),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run


def _lines_until(path: Path, step: int) -> list[dict]:
    """The lines of a metrics file up to ``step``; a last line that was cut short is no line."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get(STEP), int) or row[STEP] > step:
            break
        rows.append(row)
    return rows


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _flat(config: RunConfig) -> dict:
    """Everything that a dashboard may group by, flat and short, and the full configuration below it."""
    from dataclasses import asdict

    return {
        "attention_name": config.attention.name,
        "task_name": config.task.name,
        "length": config.task.length,
        "regime": config.regime,
        "protocol": config.trainer.name,
        **asdict(config),
    }
