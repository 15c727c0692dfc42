"""``lra sweep``: the product of comma-separated overrides, one fresh process per cell.

A process per cell keeps peak memory, random state and compiled code of one run out of the next, and lets a cell
die (a signal, the system's out-of-memory killer) without taking the others along. Finished cells are skipped.
"""

import argparse
import ctypes
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from tqdm import tqdm

import lra.tasks
from lra import results
from lra.budget import Budget
from lra.config import RunConfig, compose_run
from lra.cost import describe_cost
from lra.errors import UserError
from lra.outcome import new_row
from lra.run_dir import fresh_dir, only_process
from lra.stop import Stop
from lra.train import log_to_terminal

LINE_EVERY_SECONDS = 20
"""Where stderr is no terminal, one line of progress in this interval replaces the bar."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger("lra.sweep")


@dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    overrides: list[str]
    config: RunConfig

    @property
    def name(self) -> str:
        c = self.config
        return f"{c.attention.name} {c.task.name}@{c.task.length} seed {c.seed}"

    def status(self) -> str | None:
        """Status of the row on disk, ``None`` without a readable one."""
        try:
            return results.load(self.config.run_dir / results.RESULT_FILE).status
        except (OSError, ValueError, TypeError):
            return None


def expand(overrides: list[str]) -> list[list[str]]:
    """All combinations of the swept overrides, in the order given; the last one varies fastest."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        raise UserError(f"{error.override}: not a valid override; write key=value or key=value,value") from None
    axes = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            try:
                axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            except HydraException:  # interval() and glob() name no values
                raise UserError(
                    f"{override.input_line}: a sweep needs values; write key=value,value or key=range(low,high)"
                ) from None
        else:
            axes.append([override.input_line])
    return [list(cell) for cell in itertools.product(*axes)]


class Progress:
    """One bar over the optimiser steps of all cells: what runs, and how long is left."""

    def __init__(self, cells: list[Cell]) -> None:
        self._count = len(cells)
        self._steps = sum(c.config.trainer.steps for c in cells)
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=self._steps, unit="step", disable=not self._terminal, smoothing=0.1, dynamic_ncols=True)
        self._before = 0
        self._done = 0
        self._start = self._last_line = time.monotonic()
        self._label = ""

    def begin(self, index: int, cell: Cell) -> None:
        """The next cell starts."""
        self._label = f"[{index}/{self._count}] {cell.name}"
        self._bar.set_description_str(self._label)
        self._before = self._done

    def update(self, step: int) -> None:
        """The running cell has done ``step`` steps."""
        self._bar.update(self._before + step - self._done)
        self._done = self._before + step
        now = time.monotonic()
        if not self._terminal and now - self._last_line >= LINE_EVERY_SECONDS and self._done:
            self._last_line = now
            left = (now - self._start) * (self._steps - self._done) / self._done
            log.info("%s: step %d, about %s left in all", self._label, step, tqdm.format_interval(left))

    def line(self, text: str) -> None:
        """Print a line without tearing the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            log.info("%s", text)

    def end(self, cell: Cell) -> None:
        """The running cell is over, finished or not."""
        self.update(cell.config.trainer.steps)

    def close(self) -> None:
        self._bar.close()


def _end_with_parent() -> None:
    """In the child: get SIGTERM when the sweep dies, even by SIGKILL, so that no orphan goes on training."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_cell(cell: Cell, progress: Progress) -> str:
    """Run one cell in its own process; returns its status, and leaves a row whatever happened."""
    started = time.time()
    metrics = cell.config.run_dir / "metrics.jsonl"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lra.train", *cell.overrides],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TQDM_DISABLE": "1"},
            # out of reach of the terminal's Ctrl-C: it gets one signal, from here, and time to write its row
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            while process.poll() is None:
                progress.update(_last_step(metrics, started))
                time.sleep(0.2)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        output.seek(0)
        return _settle(cell, process.returncode, output.read(), started)


def _settle(cell: Cell, code: int, output: str, started: float) -> str:
    """The status of an ended process; writes the row that a killed one could not write."""
    path = cell.config.run_dir / results.RESULT_FILE
    if path.exists() and path.stat().st_mtime >= started - 1 and (status := cell.status()):
        return status
    lines = [line for line in output.strip().splitlines() if line.strip()]
    error = lines[-1] if lines else f"exit code {code}"
    if code < 0:
        hint = ", often the system's out-of-memory killer" if -code == signal.SIGKILL else ""
        error = f"killed by {signal.Signals(-code).name}{hint}"
    elif code == 128 + signal.SIGKILL:
        error = f"exit code {code}: killed, often by the system's out-of-memory killer"
    row = new_row(cell.config)
    row.status, row.error, row.resumable = "failed", error, True
    with only_process(cell.config):
        if path.exists():  # of an earlier run: kept, not overwritten
            fresh_dir(cell.config)
        results.save(row, cell.config.run_dir)
    return row.status


def _last_step(metrics: Path, started: float) -> int:
    """The last step that the running process has logged."""
    try:
        if metrics.stat().st_mtime < started:
            return 0
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 4096))
            line = file.read().splitlines()[-1]
        return int(json.loads(line)["trainer/step"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def check_data(cells: list[Cell]) -> None:
    """Raise before the first cell starts if data is missing or broken, or too small for the trainer.

    Each data set is opened once.
    """
    rows: dict[str, int] = {}
    for config in (c.config for c in cells):
        key = f"{config.task} {config.data_dir}"
        if key not in rows:
            info, _ = lra.tasks.load(config.task.name).load(config.task, Path(config.data_dir))
            rows[key] = info.splits["train"]
        Budget(config.trainer, rows[key])


def main(arguments: list[str]) -> int:
    """Run ``lra sweep``; exit code 1 if any cell failed."""
    parser = argparse.ArgumentParser(
        prog="lra sweep",
        description="Run all combinations of comma-separated Hydra overrides, one process each.",
        epilog="Example: lra sweep task=listops regime=short,medium attention=flash,performer,rwkv4 seed=0,1,2",
    )
    parser.add_argument("overrides", nargs="+", help="key=value or key=value,value,...")
    parser.add_argument("--rerun", action="store_true", help="run finished cells again")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first cell that fails")
    parser.add_argument("--dry-run", action="store_true", help="list the cells and what they cost, run nothing")
    options = parser.parse_intermixed_args(arguments)
    log_to_terminal()
    every = [Cell(o, compose_run(o)) for o in expand(options.overrides)]
    cells = list({c.config.run_id: c for c in every}.values())
    if options.dry_run:
        print(describe_cost([c.config for c in cells]))
        return 0
    check_data(cells)
    todo = [c for c in cells if options.rerun or c.status() not in results.SCORED]
    if len(cells) > len(todo):
        log.info("%d of %d runs are finished already; --rerun runs them again", len(cells) - len(todo), len(cells))
    statuses = Counter(skipped=len(cells) - len(todo))
    with Stop().listening():
        try:
            statuses += _run_all(todo, fail_fast=options.fail_fast)
        except KeyboardInterrupt:
            done = sum(c.status() in results.SCORED for c in cells)
            log.warning("interrupted: %d of %d runs are finished; the same command does the others", done, len(cells))
            raise
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items() if count)
    log.info("%s; compare them with: lra table", counts)
    return 0 if all(status in (*results.SCORED, "skipped") for status, count in statuses.items() if count) else 1


def _run_all(cells: list[Cell], *, fail_fast: bool) -> Counter:
    """Run the cells one after the other; how many ended in which status."""
    statuses: Counter = Counter()
    progress = Progress(cells)
    try:
        for index, cell in enumerate(cells, 1):
            progress.begin(index, cell)
            try:
                status = run_cell(cell, progress)
            except (UserError, OSError) as error:  # held by another process, or no room for its row
                status = "failed"
                progress.line(f"[{index}/{len(cells)}] {cell.name}: {error}")
                statuses[status] += 1
                continue
            statuses[status] += 1
            progress.end(cell)
            progress.line(f"[{index}/{len(cells)}] {cell.name}: {_report(cell, status)}")
            if fail_fast and status not in results.SCORED:
                break
    finally:
        progress.close()
    return statuses


def _report(cell: Cell, status: str) -> str:
    row = results.load(cell.config.run_dir / results.RESULT_FILE)
    if status in results.SCORED:
        accuracy = f"test {100 * row.test_accuracy:.1f} % (majority {100 * row.majority_baseline:.1f} %)"
        return f"{status}, {accuracy}, trained in {row.train_seconds:.0f} s"
    return f"{status}: {row.error} ({cell.config.run_dir})"
