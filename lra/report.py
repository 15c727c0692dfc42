"""Cells -> a document of headings, tables and notes, the same for every output format."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lra.cells import PARAMETER_TOLERANCE, PATH_X, Cell, Column, Section, sections

MISSING = "–"
LEGEND = {
    "FAIL": "FAIL: the run raised an error",
    "OOM": "OOM: out of memory",
    "STUCK": "STUCK: accuracy not above the majority class",
    "INT": "INT: interrupted",
}


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Table:
    caption: str
    header: list[str]
    rows: list[list[str]]
    text_columns: frozenset[int] = frozenset({0})
    """Columns that hold words; the others hold numbers and are set flush right."""


@dataclass(frozen=True)
class Notes:
    items: list[str]


Part = Heading | Table | Notes


def document(cells: list[Cell], published: list[dict[str, str]]) -> list[Part]:
    """The whole report: a section for each comparable group of columns, then the published numbers."""
    parts: list[Part] = [Heading("Long Range Arena comparison", 1)]
    for section in sections(cells):
        parts.append(Heading(section.title))
        parts += _single(section) if len(section.columns) == 1 else _several(section)
    return parts + _published(cells, published)


def _single(section: Section) -> list[Part]:
    """One column: everything about a backend in one line."""
    column, cells = section.columns[0], section.of(section.columns[0])
    fields: dict[str, Callable[[Cell], str]] = {"backend": lambda c: c.backend}
    fields["accuracy %"] = lambda c: _accuracy(c, _usual_n(section))
    if any(cell.interval for cell in cells):
        fields["95 % CI"] = _interval
    fields |= {
        "train s": lambda c: _number(c.train_seconds),
        "tokens/s": lambda c: _number(c.tokens_per_second),
    }
    if _with_baseline(section):
        fields["× softmax"] = lambda c: _number(c.speed_vs_softmax, 2)
    fields |= {"peak MiB": _mebibytes, "params": lambda c: _parameters([c], section)}
    first_word = len(fields)
    fields |= {name: read for name, read in RAN.items() if name == "kernel" or len({read(c) for c in cells}) > 1}
    rows = [[read(cell) for read in fields.values()] for cell in cells]
    majority = _majority(section, column)
    rows.append(["majority class", majority] + [""] * (len(fields) - 2))
    words = frozenset({0, *range(first_word, len(fields))})
    return [
        Table(f"{column.label} (regime {column.regime})", list(fields), rows, words),
        Notes(_notes(section)),
    ]


def _several(section: Section) -> list[Part]:
    """Several columns: a table for each figure, backends down, columns across."""
    n, averaged = _usual_n(section), bool(section.averaged)
    labels = [column.label for column in section.columns]
    rows = _pivot(section, section.columns, lambda cell: _accuracy(cell, n))
    majority = ["majority class", *(_majority(section, column) for column in section.columns)]
    if averaged:
        for row in rows:
            row.append(_percent(section.average(row[0])))
        majority.append("")
    header = ["backend", *labels, *(["avg"] if averaged else [])]
    parts: list[Part] = [Table("Test accuracy, %", header, [*rows, majority])]
    for caption, read, columns in (
        ("Training time, s", lambda cell: _number(cell.train_seconds), section.columns),
        (
            "Throughput relative to softmax, ×",
            lambda cell: _number(cell.speed_vs_softmax, 2),
            _with_baseline(section),
        ),
        ("Throughput, tokens/s", lambda cell: _number(cell.tokens_per_second), section.columns),
        ("Peak memory, MiB", _mebibytes, section.columns),
    ):
        if columns:
            header = ["backend", *(column.label for column in columns)]
            parts.append(Table(caption, header, _pivot(section, columns, read)))
    ran = []
    for backend in section.backends:
        cells = [cell for column in section.columns if (cell := section.get(backend, column))]
        words = (_join(read(cell) for cell in cells) for read in RAN.values())
        ran.append([backend, _parameters(cells, section), *words])
    words = frozenset({0, *range(2, len(RAN) + 2)})
    parts.append(Table("What really ran", ["backend", "params", *RAN], ran, words))
    parts.append(_settings(section))
    return [*parts, Notes(_notes(section))]


def _settings(section: Section) -> Table:
    """The footnote that names the protocol behind every column."""
    rows = []
    for column in section.columns:
        cells = section.of(column)
        steps = _join(count for cell in cells for count in cell.steps)
        batch = _join(size for cell in cells for size in cell.batch_sizes)
        words = [column.label, column.regime, column.protocol_hash, column.task_version]
        rows.append([*words, steps, batch, _join(counts for cell in cells for counts in cell.row_counts)])
    header = ["column", "regime", "protocol hash", "task version", "steps", "batch", "rows: train / validation / test"]
    return Table("Protocol of each column", header, rows, frozenset({0, 1, 2, 3, 6}))


def _with_baseline(section: Section) -> list[Column]:
    """The columns in which some backend has a speed relative to softmax."""
    return [c for c in section.columns if any(cell.speed_vs_softmax is not None for cell in section.of(c))]


def _pivot(section: Section, columns: list[Column], read: Callable[[Cell], str]) -> list[list[str]]:
    def cell_text(backend: str, column: Column) -> str:
        cell = section.get(backend, column)
        return read(cell) if cell else MISSING

    return [[b, *(cell_text(b, column) for column in columns)] for b in section.backends]


def _notes(section: Section) -> list[str]:
    """What a reader must know before comparing two numbers of the section."""
    cells = list(section.cells.values())
    n = _usual_n(section)
    seeds = "1 seed" if n < 2 else f"mean ± sample standard deviation over {n} seeds"
    notes = [f"Accuracy: test split at the checkpoint that validation chose; {seeds} unless the cell says n."]
    if len(section.columns) == 1:
        _, _, digest, version, steps, batch, counts = _settings(section).rows[0]
        facts = [f"protocol hash {digest}", f"task version {version}", f"{steps} steps of batch {batch}"]
        if counts != MISSING:
            facts.append(f"{counts} rows to train, validate and test")
        same = {name: {read(cell) for cell in cells} for name, read in RAN.items() if name != "kernel"}
        facts += [f"{name} {next(iter(found))}" for name, found in same.items() if len(found) == 1]
        notes.append(f"All rows: {'; '.join(facts)}.")
    if section.averaged:
        names = ", ".join(column.label for column in section.averaged)
        notes.append(
            f"Average: over {names}, the columns that every backend here has run (Path-X never counts, as "
            "in LRA); blank where a cell has no accuracy, for a failure is not 50 %."
        )
    compared = _with_baseline(section)
    speeds = "tokens/s and × softmax" if compared else "tokens/s"
    notes.append(
        f"Time is data plus compute, mean over seeds; {speeds} are medians of the real tokens; "
        "evaluation and compilation are not in them."
    )
    if lacking := [column.label for column in section.columns if column not in compared]:
        notes.append(f"No × softmax for {', '.join(lacking)}: no softmax run here has a speed to compare with.")
    marks = " ".join(cell.failures for cell in cells)
    notes += [f"{text}." for mark, text in LEGEND.items() if mark in marks]
    kinds = _join(kind for cell in cells for kind in cell.memory_kinds)
    if kinds != MISSING:
        notes.append(f"Peak memory is measured as: {kinds}.")
    return notes + _warnings(section)


def _warnings(section: Section) -> list[str]:
    """Where cells of one column are not on equal terms."""
    notes: dict[str, list[str]] = {}
    for column in section.columns:
        cells = section.of(column)
        for read, message in (
            (lambda c: c.device_names, "ran on {}: speeds across devices are not compared"),
            (lambda c: c.memory_kinds, "memory was measured in several ways ({}): do not compare it"),
            (lambda c: c.dtypes, "mixed precision between backends ({}): speed differs for that too"),
            (lambda c: c.directions, "mixed directions between backends ({}): a causal one sees only what came before"),
        ):
            found = sorted({value for cell in cells for value in read(cell)})
            if len(found) > 1:
                notes.setdefault(message.format(" and ".join(found)), []).append(column.label)
        if any(_oversized(cell, cells) for cell in cells):
            message = "† parameters differ by more than 10 % (marked: above the smallest by more than that)"
            notes.setdefault(message, []).append(column.label)
        said: dict[str, list[str]] = {}
        for cell in cells:
            for text in cell.warnings:
                said.setdefault(text, []).append(cell.backend)
        for text, backends in said.items():
            every = len(backends) == len(cells)
            where = column.label if every else f"{column.label} {', '.join(backends)}"
            notes.setdefault(text, []).append(where)
    return [f"! {', '.join(labels)}: {message}." for message, labels in notes.items()]


def _published(cells: list[Cell], published: list[dict[str, str]]) -> list[Part]:
    """Cited numbers for the backends and tasks that we ran, each backend's own native results above them."""
    columns = sorted({c.column for c in cells}, key=lambda column: column.order)
    foreign = list(dict.fromkeys(c.label for c in columns if not c.native))
    native = list(dict.fromkeys(c.at_home for c in columns if c.at_home))
    lines = [line for line in published if (line["task"], int(line["length"])) in native]
    rows: list[list[str]] = []
    cited: list[dict[str, str]] = []
    without = []
    for backend in dict.fromkeys(c.backend.split("#")[0] for c in cells):
        mine = [line for line in lines if line["backend"] == backend]
        if not mine:
            without.append(backend)
            continue
        rows += _own_rows(backend, cells, native) + _cited_rows(mine, native)
        cited += mine
    notes = list(dict.fromkeys(_citation(line) for line in cited))
    if foreign:
        notes.append(f"No published number for {', '.join(foreign)}: published scores are for LRA's own lengths only.")
    if native and without:
        notes.append(f"No verified published number for {', '.join(without)}.")
    parts: list[Part] = [Heading("Published numbers, other protocols; for orientation only")]
    if rows:
        names = ["path-x" if at == PATH_X else f"{at[0]} {at[1]}" for at in native]
        caption = "Test accuracy, %, at LRA's own lengths"
        parts.append(Table(caption, ["model", "source", *names], rows, frozenset({0, 1})))
    return [*parts, Notes(notes)] if notes else []


def _own_rows(backend: str, cells: list[Cell], native: list[tuple[str, int]]) -> list[list[str]]:
    """Our native results of a backend, one line for each protocol."""
    lines: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for section in sections(cells):
        for (name, column), cell in section.cells.items():
            if name.split("#")[0] == backend and column.native:
                score = _percent(cell.accuracy) or cell.failures or "no test"
                found = lines.setdefault((name, section.block), {})
                found[column.at_home] = score + (" STUCK" if cell.stuck else "")
    return [[name, f"ours: {block}", *(found.get(at, MISSING) for at in native)]
            for (name, block), found in lines.items()]  # fmt: skip


def _cited_rows(lines: list[dict[str, str]], native: list[tuple[str, int]]) -> list[list[str]]:
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for line in lines:
        at = (line["task"], int(line["length"]))
        found.setdefault((line["model"], f"cited: {line['source']}"), {})[at] = line["accuracy"] or "no score"
    return [[*key, *(scores.get(at, MISSING) for at in native)] for key, scores in found.items()]


def _citation(line: dict[str, str]) -> str:
    read = {"V": "read in the source", "T": "read in a transcription of the paper"}[line["trust"]]
    return f"{line['source']}: {line['citation']} ({read}). {line['protocol_family']}."


def _usual_n(section: Section) -> int:
    return max((cell.scored for cell in section.cells.values()), default=0)


def _accuracy(cell: Cell, usual_n: int) -> str:
    """``37.52 ±0.41 (n=2, 1 FAIL)``; the mark alone where nothing was scored."""
    if cell.accuracy is None:
        return cell.failures or "no test"
    text = _percent(cell.accuracy)
    if cell.accuracy_std is not None:
        text += f" ±{100 * cell.accuracy_std:.2f}"
    if cell.stuck and cell.scored == sum(cell.statuses.values()) == 1:
        return f"{text} STUCK" if usual_n == 1 else f"{text} STUCK (n=1)"
    if cell.scored == usual_n and not cell.failures:
        return text
    return f"{text} ({', '.join(filter(None, (f'n={cell.scored}', cell.failures)))})"


def _interval(cell: Cell) -> str:
    return f"{100 * cell.interval[0]:.1f}–{100 * cell.interval[1]:.1f}" if cell.interval else MISSING


def _majority(section: Section, column: Column) -> str:
    """What a constant answer scores on the test split, as the runs found it."""
    return _join(_percent(cell.majority) for cell in section.of(column) if cell.majority is not None)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _number(value: float | None, digits: int | None = None) -> str:
    """About three significant digits, thousands apart."""
    if value is None:
        return MISSING
    return f"{value:,.{digits if digits is not None else 1 if abs(value) < 100 else 0}f}"


def _mebibytes(cell: Cell) -> str:
    return MISSING if cell.peak_memory_bytes is None else _number(cell.peak_memory_bytes / 2**20)


def _oversized(cell: Cell, cells: list[Cell]) -> bool:
    smallest = min((other.parameters for other in cells if other.parameters), default=0)
    return bool(cell.parameters) and cell.parameters > PARAMETER_TOLERANCE * smallest


def _parameters(cells: list[Cell], section: Section) -> str:
    """Rounded count, a range over columns; the exact ones are in the CSV."""
    counts = sorted({cell.parameters for cell in cells if cell.parameters is not None})
    if not counts:
        return MISSING
    text = "–".join(dict.fromkeys(_rounded(count) for count in (counts[0], counts[-1])))
    return f"{text} †" if any(_oversized(cell, section.of(cell.column)) for cell in cells) else text


def _rounded(count: int) -> str:
    """812345 -> 812k, 1234567 -> 1.23M."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.2f}M"


def _join(values: Iterable[object]) -> str:
    found = [str(value) for value in dict.fromkeys(values) if value != MISSING]
    return ", ".join(found) or MISSING


RAN: dict[str, Callable[[Cell], str]] = {
    "kernel": lambda cell: _join(cell.kernels),
    "dtype": lambda cell: _join(cell.dtypes),
    "direction": lambda cell: _join(cell.directions),
    "device": lambda cell: _join(cell.device_names),
}
"""What a run reports about itself."""
