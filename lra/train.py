"""One run, from a configuration to a result row: ``lra train`` and ``python -m lra.train``."""

import logging
import os
import sys
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

import lra.tasks
from attention import kernels
from attention import load as load_mixer
from attention.kernels.inputs import EMULATES_HALF
from lra.budget import Budget
from lra.checkpoint import Checkpoints
from lra.config import (
    COMPOSITION_ERRORS,
    HYDRA_VERSION_BASE,
    RunConfig,
    choices,
    conf_dir,
    describe,
    refuse_schemas,
    register,
    resolve,
)
from lra.data.arrays import Split
from lra.determinism import deterministic
from lra.distributed import Ranks, join, ranks
from lra.errors import UserError, describe_os
from lra.evaluation import save_predictions
from lra.flops import utilisation
from lra.memory_limit import memory_limit
from lra.meter import Meter, tune_allocator
from lra.outcome import finish, judge, new_row, outcome, report_failure, summary
from lra.results import ResultRow
from lra.run_dir import CHECKPOINTS, log_file, only_process, open_dir
from lra.stop import Stop
from lra.tasks.base import TaskInfo
from lra.tracking import NoTracker, Tracker
from lra.trainer import Trainer, parameter_count
from models import build_model

EXIT_CODES = {"ok": 0, "stuck": 0, "failed": 1, "oom": 1, "interrupted": 130}
EMULATED = (
    "this CPU has no bf16 arithmetic: torch emulates its products in about a hundred times the time of fp32; "
    "trainer.precision=fp32 is faster and more exact"
)
PREDICTIONS = "predictions.npz"

log = logging.getLogger("lra")


def run(config: RunConfig) -> ResultRow:
    """Train, select on validation, test once. The row is on disk when this returns, whatever happened.

    A run of the same configuration that did not end is taken up at its last checkpoint.
    """
    info, splits = lra.tasks.load(config.task.name).load(config.task, Path(config.data_dir))
    _check_ranks(config)
    Budget(config.trainer, info.splits["train"])  # what does not fit these rows is refused here too
    row = new_row(config, info)
    if config.trainer.precision == "bf16" and config.device == "cpu" and EMULATES_HALF:
        row.warnings.append(EMULATED)
    mine = join(config.device)
    with Stop().listening() as stop:
        if not mine.first:
            mine.wait()  # until the first rank has the directory ready
            _Run(config, info, splits, row, mine, stop).train_and_test(NoTracker())
            return row
        with only_process(config), log_file(open_dir(config)):
            log.info("%s", config.run_dir)
            if EMULATED in row.warnings:  # before hours are spent, not only after them
                log.warning(EMULATED)
            mine.wait()
            # a checkpoint that cannot be used is refused here, before anything is written
            this = _Run(config, info, splits, row, mine, stop)
            try:
                _tracked(this)
            except BaseException as error:
                if row.finished is None:  # stopped before the training began
                    finish(row, config.run_dir, error)
                report_failure(row, error, config.run_dir)
            else:
                log.info("%s", outcome(row))
                for warning in row.warnings:
                    log.warning("note: %s", warning)
    return row


def _tracked(run: "_Run") -> None:
    """Train and test with a tracker; the row is written before the tracker is closed."""
    with Tracker(run.config, run.config.run_dir, resume_step=run.resume_step) as tracker:
        try:
            run.train_and_test(tracker)
        except BaseException as error:
            finish(run.row, run.config.run_dir, error)
            raise
        finish(run.row, run.config.run_dir)
        tracker.summary(summary(run.row))


def _check_ranks(config: RunConfig) -> None:
    trainer, world = config.trainer, ranks().world
    if trainer.batch_size < world * trainer.accumulation:
        raise UserError(
            f"trainer.batch_size={trainer.batch_size} gives some of {world} ranks x trainer.accumulation="
            f"{trainer.accumulation} micro-batches no row; raise it, or use fewer ranks"
        )
    if world > 1 and trainer.on_oom == "halve":
        raise UserError("trainer.on_oom=halve works in one process only: the other ranks would wait for ever")


class _Run:
    """The parts of one run in this process, and the row that it fills."""

    def __init__(
        self, config: RunConfig, info: TaskInfo, splits: dict[str, Split], row: ResultRow, mine: Ranks, stop: Stop
    ) -> None:
        self.config, self.info, self.splits, self.row = config, info, splits, row
        self.ranks, self.stop = mine, stop
        row.ranks = mine.world
        self.checkpoints = Checkpoints(config.run_dir / CHECKPOINTS, config.fingerprint())
        self.state = self.checkpoints.latest()
        if self.state is not None and len(self.state["rng"]) != mine.world:
            raise UserError(
                f"{config.run_dir}: {len(self.state['rng'])} ranks trained this run until step {self.state['step']}, "
                f"now there are {mine.world}: speed and random numbers would differ; start as many again, or start "
                f"anew with resume=never"
            )

    @property
    def resume_step(self) -> int | None:
        """The last step whose line of metrics the checkpoint takes for written; ``None`` for a new run."""
        return None if self.state is None else self.state["step"] - bool(self.state["pending"])

    def train_and_test(self, tracker: NoTracker) -> None:
        """Fill the row; it is as complete as it can be when an exception leaves."""
        config, row = self.config, self.row
        with deterministic(config.trainer.deterministic) as surprises:
            trainer, meter = self._build(tracker)
            try:
                with memory_limit(config.trainer.memory_limit_gib, trainer.device):
                    trainer.fit()
            finally:
                if trainer.best:
                    row.validation_accuracy, row.selected_step = trainer.best.accuracy, trainer.best_step
                meter.close_training_window()
                self._measured(meter)
                row.epochs, row.accumulation = trainer.epochs(row.steps), trainer.accumulation
                row.warnings += trainer.notes
            if trainer.budget.cut_short(trainer.spent()):
                row.warnings.append(
                    f"trainer.time_limit={config.trainer.time_limit} ended the training at step {row.steps}"
                    + (f" of {trainer.budget.steps}" if trainer.budget.steps else "")
                )
            if trainer.step <= config.trainer.warmup:
                row.warnings.append(f"the training ended at step {trainer.step}, within the warm-up of the rate")
            if row.steps and row.step_ms is None:
                row.warnings.append(
                    f"no step was timed: the first {config.trainer.timing_warmup} do not count (trainer.timing_warmup)"
                )
            with meter.evaluation():
                predictions = trainer.predict("test")
        row.warnings += surprises
        row.kernel = kernels.last_used(load_mixer(config.attention.name).op)
        self._measured(meter)
        fields = utilisation(
            trainer.model,
            meter,
            config.trainer.precision,
            documents=self.splits["train"].documents,
            devices=self.ranks.world,
        )
        for key, value in fields.items():
            setattr(row, key, value)
        meter.close()
        if self.ranks.first:
            save_predictions(predictions, config.run_dir / PREDICTIONS)
        judge(row, predictions.score(self.info.num_classes))

    def _build(self, tracker: NoTracker) -> tuple[Trainer, Meter]:
        config = self.config
        on_rank = config.device == "cuda" and self.ranks.world > 1
        device = torch.device(f"cuda:{self.ranks.local_rank}" if on_rank else config.device)
        seeds = np.random.SeedSequence(config.seed).generate_state(2)
        torch.manual_seed(int(seeds[0]))
        meter = Meter(device, warmup_steps=config.trainer.timing_warmup, compiled=config.trainer.compile)
        with meter.account("compile"):
            kernels.available(load_mixer(config.attention.name).op, device.type)
        model = build_model(config.model, config.attention, **self.info.network())
        if self.ranks.rank:  # the same weights everywhere, but not the same dropout
            torch.manual_seed(int(seeds[0]) + self.ranks.rank)
        self.row.parameters = parameter_count(model)
        trainer = Trainer(
            model,
            self.splits,
            config.trainer,
            num_classes=self.info.num_classes,
            device=device,
            meter=meter,
            tracker=tracker,
            checkpoints=self.checkpoints,
            data_seed=int(seeds[1]),
            ranks=self.ranks,
            stop=self.stop,
        )
        if self.state is not None:
            trainer.restore(self.state)
            log.info("going on from the checkpoint of step %d", trainer.step)
        return trainer, meter

    def _measured(self, meter: Meter) -> None:
        for key, value in meter.report().items():
            setattr(self.row, key, value)


class _Terminal(logging.Handler):
    """Writes to what ``sys.stderr`` is at the time of the message, not at the time of the first run."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def log_to_terminal() -> None:
    """Plain INFO lines on stderr."""
    log.setLevel(logging.INFO)
    log.propagate = False
    if not any(isinstance(h, _Terminal) for h in log.handlers):
        handler = _Terminal()
        handler.setLevel(logging.INFO)
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
        except OSError as error:
            print(f"error: {describe_os(error)}", file=sys.stderr)
            codes.append(2)
            return
        codes.append(EXIT_CODES[status])
        if status == "interrupted":
            raise KeyboardInterrupt

    try:
        refuse_schemas(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(choices())
    # Hydra 1.3 takes -m only before or after all overrides
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    # with this set Hydra lets its own exceptions through, so that they too become one line of ours
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base=HYDRA_VERSION_BASE, config_path=str(conf_dir()), config_name="config")(job)()
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    except COMPOSITION_ERRORS as error:
        print(f"error: {describe(error, sys.argv[1:])}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {describe_os(error)}", file=sys.stderr)
        return 2
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
