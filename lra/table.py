"""Rows -> comparison table. ``lra table`` writes it as Markdown, CSV and picture and prints one format."""

import argparse
import csv
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lra import results
from lra.cells import Cell, Column
from lra.errors import UserError
from lra.render import FORMATS, render_cells
from lra.results import SCORED, ResultRow

PUBLISHED = Path(__file__).parents[1] / "results" / "published.csv"
PUBLISHED_COLUMNS = (
    "model", "backend", "task", "length", "accuracy", "source", "citation", "trust", "protocol_family", "note",
)  # fmt: skip
BASELINE = "softmax"
"""The yardstick of speed."""

log = logging.getLogger(__name__)


def aggregate(rows: Iterable[ResultRow]) -> list[Cell]:
    """One cell for each backend and column, its runs summarised over seeds."""
    runs = _newest(rows)
    cells = [
        _cell(backend, column, group) for (backend, column), group in runs.groupby(["backend", "column"], sort=False)
    ]
    baselines = {cell.column: cell for cell in cells if cell.backend == BASELINE}
    for cell in cells:
        cell.speed_vs_softmax = _ratio(cell, baselines.get(cell.column))
    return sorted(cells, key=lambda cell: (_rank(cell.backend), cell.column.order))


def render(cells: list[Cell], fmt: str = "md") -> str:
    """The comparison table of ``cells`` as ``md``, ``csv``, ``latex`` or ``html``."""
    if fmt == "csv":
        return tidy(cells).to_csv(index=False, lineterminator="\n")
    return render_cells(cells, read_published(), fmt)


def tidy(cells: list[Cell]) -> pd.DataFrame:
    """One line for each backend and column, every figure in it, with the runs that it comes from."""
    lines = []
    for cell in cells:
        line = {"backend": cell.backend, **vars(cell.column), **vars(cell), **_counts(cell)}
        line["interval_low"], line["interval_high"] = cell.interval or (None, None)
        for name in ("column", "statuses", "interval"):
            del line[name]
        lines.append({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in line.items()})
    frame = pd.DataFrame(lines)
    for name in ("parameters", "peak_memory_bytes"):
        frame[name] = frame[name].astype("Int64")
    return frame


def read_published(path: Path = PUBLISHED) -> list[dict[str, str]]:
    """Lines of ``published.csv``, every one with its source; empty where an installation lacks the file.

    Raises ``UserError`` for a file that is damaged.
    """
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            lines, columns = list(reader), tuple(reader.fieldnames or ())
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: expected CSV in UTF-8, found other bytes ({error}); restore the file") from None
    if columns != PUBLISHED_COLUMNS:
        found = ", ".join(columns) or "nothing"
        raise UserError(f"{path}: expected the columns {', '.join(PUBLISHED_COLUMNS)}, found {found}; restore the file")
    for number, line in enumerate(lines, 2):
        if None in line or None in line.values() or not line["length"].isdecimal() or line["trust"] not in ("V", "T"):
            raise UserError(
                f"{path}: row {number}: expected {len(PUBLISHED_COLUMNS)} values with a number as length and V or T as "
                f"trust, found {line}; correct it"
            )
    return lines


def load_rows(runs_dir: Path) -> list[ResultRow]:
    """The readable rows below ``runs_dir``; without any, ``UserError`` says which command makes runs."""
    fix = "make runs with `lra train` or `lra sweep`, or name their folder with --runs"
    if not runs_dir.is_dir():
        raise UserError(f"--runs {runs_dir} is not a folder; {fix}")
    try:
        os.scandir(runs_dir).close()  # a search in a folder that may not be read finds nothing and says nothing
    except OSError as error:
        raise UserError(f"--runs {runs_dir}: cannot be read ({error.strerror}); fix its permissions") from None
    rows = list(results.load_all(runs_dir))
    if rows:
        return rows
    if any(runs_dir.glob(f"[!.]*/{results.RESULT_FILE}")):
        raise UserError(f"--runs {runs_dir} has no readable {results.RESULT_FILE}, see the warnings above; {fix}")
    raise UserError(f"--runs {runs_dir} holds no finished run (*/{results.RESULT_FILE}); {fix}")


def main(argv: list[str]) -> int:
    """``lra table``: write PREFIX.md, PREFIX.csv and PREFIX.png, print the chosen format."""
    parser = argparse.ArgumentParser(prog="lra table", description="Compare the runs of a folder.")
    runs = Path(os.environ.get("LRA_RUNS_DIR") or "results/runs")
    parser.add_argument("--runs", type=Path, default=runs, help="folder of runs (%(default)s)")
    parser.add_argument("--format", choices=FORMATS, default="md", help="what to print (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/table"), metavar="PREFIX", help="(%(default)s)")
    options = parser.parse_args(argv)
    # without a handler a warning about a skipped row has nowhere sure to go; a caller's handlers are kept
    logging.basicConfig(format="%(levelname)s: %(message)s")

    if not options.out.name:
        raise UserError(f"--out {options.out}: expected the beginning of file names, found a folder; add a name to it")
    rows = load_rows(options.runs)
    from lra.plot import draw  # slow to import, and needed only once there is something to draw

    cells = aggregate(rows)
    texts = {fmt: render(cells, fmt) for fmt in ("md", "csv", options.format)}
    contents = {**{fmt: texts[fmt] for fmt in ("md", "csv")}, "png": draw(cells)}
    for suffix, content in contents.items():
        path = options.out.with_name(f"{options.out.name}.{suffix}")
        try:
            results.write_atomic(path, content)
        except OSError as error:
            raise UserError(f"--out {options.out}: cannot write {path} ({error.strerror}); choose another") from None
    try:
        print(texts[options.format], end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot print the table ({error.strerror}); it is in {options.out}.*") from None
    return 0


def _newest(rows: Iterable[ResultRow]) -> pd.DataFrame:
    """A frame of runs, one for each backend, column and seed: of repeated ones the one that finished last."""
    rows = sorted(rows, key=lambda row: (results.finished_at(row), row.run_id))
    options: dict[str, set[str | None]] = {}
    for row in rows:
        options.setdefault(row.attention, set()).add(row.attention_hash)
    chosen: dict[tuple[str, Column, int], ResultRow] = {}
    for row in rows:
        # one mechanism with two settings is two backends, not two seeds of one
        several = len(options[row.attention]) > 1
        backend = f"{row.attention}#{(row.attention_hash or 'unknown')[:6]}" if several else row.attention
        column = Column(
            row.protocol, row.protocol_hash, row.task, row.task_version or "?", row.length, row.regime,
            row.fidelity or "lra",
        )  # fmt: skip
        key = (backend, column, row.seed)
        if key in chosen:
            log.warning("%s and %s are the same cell and seed: the newer, %s, counts",
                        chosen[key].run_id, row.run_id, row.run_id)  # fmt: skip
        chosen[key] = row
    frame = pd.DataFrame([vars(row) for row in chosen.values()])
    frame["backend"] = [key[0] for key in chosen]
    frame["column"] = [key[1] for key in chosen]
    frame["train_seconds"] = [row.train_seconds for row in chosen.values()]
    frame["evaluation_seconds"] = [row.seconds.evaluation for row in chosen.values()]
    frame["compile_seconds"] = [row.seconds.compile for row in chosen.values()]
    return frame


def _row_counts(counts: dict[str, int]) -> str:
    return " / ".join(f"{counts[name]:,}" if name in counts else "?" for name in ("train", "validation", "test"))


def _cell(backend: str, column: Column, runs: pd.DataFrame) -> Cell:
    """Summary of the runs of one cell. Figures come from the scored runs; failed ones are only counted.

    A stuck run is scored: it has a measured accuracy, and leaving it out would flatter the backend.
    """
    counts = runs["status"].value_counts().sort_index()
    scored = runs[runs["status"].isin(SCORED)]
    accuracy = pd.to_numeric(scored["test_accuracy"]).dropna()
    cell = Cell(backend, column, {str(k): int(v) for k, v in counts.items()}, scored=len(accuracy))
    if len(accuracy):
        cell.accuracy = float(accuracy.mean())
        cell.accuracy_std = float(accuracy.std(ddof=1)) if len(accuracy) > 1 else None
    if len(accuracy) == 1 and (interval := scored.loc[accuracy.index[0], "test_interval"]):
        cell.interval = (interval[0], interval[1])
    for name, how in FIGURES.items():
        values = pd.to_numeric(scored[name]).dropna()
        setattr(cell, name, float(values.agg(how)) if len(values) else None)
    majority = pd.to_numeric(runs["majority_baseline"]).dropna()
    cell.majority = float(majority.iloc[-1]) if len(majority) else None
    parameters = pd.to_numeric(runs["parameters"]).dropna()
    cell.parameters = int(parameters.max()) if len(parameters) else None
    cell.steps = [int(v) for v in sorted(scored["steps"].dropna().unique())]
    cell.batch_sizes = [int(v) for v in sorted(runs["batch_size"].dropna().unique())]
    cell.row_counts = sorted({_row_counts(counts) for counts in runs["rows"] if counts})
    for name, source in (("memory_kinds", "memory_kind"), ("kernels", "kernel"), ("dtypes", "dtype"),
                         ("directions", "direction"), ("device_names", "device_name")):  # fmt: skip
        setattr(cell, name, sorted({str(v) for v in (scored if cell.scored else runs)[source].dropna()}))
    cell.run_ids = sorted(runs["run_id"])
    cell.warnings = list(dict.fromkeys(text for texts in runs["warnings"] for text in texts))
    return cell


FIGURES = {
    "train_seconds": "mean",
    "evaluation_seconds": "mean",
    "compile_seconds": "mean",
    "step_ms": "median",
    "tokens_per_second": "median",
    "peak_memory_bytes": "max",
}
"""How a figure of several seeds becomes one."""


def _ratio(cell: Cell, baseline: Cell | None) -> float | None:
    """Tokens per second over softmax's; ``None`` unless both ran, all of them on one and the same device."""
    if baseline is None or not cell.tokens_per_second or not baseline.tokens_per_second:
        return None
    if len(cell.device_names) != 1 or cell.device_names != baseline.device_names:
        return None
    return cell.tokens_per_second / baseline.tokens_per_second


def _rank(backend: str) -> tuple[int, str]:
    """The yardstick first, then flash, then by name."""
    name = backend.split("#")[0]
    return (("softmax", "flash").index(name) if name in ("softmax", "flash") else 2, backend)


def _counts(cell: Cell) -> dict[str, int]:
    return {f"runs_{status}": cell.statuses.get(status, 0) for status in results.STATUSES}
