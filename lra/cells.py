"""The comparison as data: columns, cells, the blocks they may be compared in, and the average rule."""

from collections.abc import Iterable
from dataclasses import dataclass, field

NATIVE = {"listops": 2000, "text": 4000, "retrieval": 4000, "image": 1024, "pathfinder": 1024}
"""LRA's own length of each task: only there do published numbers exist."""
S4_NATIVE = {**NATIVE, "listops": 2048, "text": 4096}
"""The same in the input pipeline of S4, with its end-of-sequence token."""
PATH_X = ("pathfinder", 16384)
"""Published too, but not part of LRA's average. A run's task is ``pathx`` or ``pathfinder``."""
REGIMES = ("short", "medium", "long", "extreme")
MARKS = {"failed": "FAIL", "oom": "OOM", "stuck": "STUCK", "interrupted": "INT"}
PARAMETER_TOLERANCE = 1.10
"""LRA asks that models differ by at most 10 % in parameters."""


@dataclass(frozen=True)
class Column:
    """One thing that was measured: runs outside it are never averaged or compared with runs inside."""

    protocol: str
    protocol_hash: str
    task: str
    task_version: str
    length: int
    regime: str
    fidelity: str = "lra"
    """Whose input pipeline the rows follow."""

    @property
    def label(self) -> str:
        return f"{self.task} {self.length}" + (f" ({self.fidelity})" if self.fidelity != "lra" else "")

    @property
    def order(self) -> tuple[int, str, int]:
        """Tasks as LRA lists them, then by length."""
        known = [*NATIVE, "pathx"]
        return (known.index(self.task) if self.task in known else len(known), self.task, self.length)

    @property
    def at_home(self) -> tuple[str, int] | None:
        """The task and LRA's own length for it, of which there are published numbers; None if LRA lacks the task."""
        if self.path_x:
            return PATH_X
        return (self.task, NATIVE[self.task]) if self.task in NATIVE else None

    @property
    def native(self) -> bool:
        own = S4_NATIVE if self.fidelity == "s4" else NATIVE
        return own.get(self.task) == self.length or self.path_x

    @property
    def path_x(self) -> bool:
        return self.length == PATH_X[1] and self.task in (PATH_X[0], "pathx")


@dataclass
class Cell:
    """A backend in a column: scored runs (ok or stuck) summarised, the others counted. Shares in [0, 1]."""

    backend: str
    column: Column
    statuses: dict[str, int]
    """Runs by status."""
    accuracy: float | None = None
    accuracy_std: float | None = None
    """Sample standard deviation over seeds; ``None`` for a single one."""
    scored: int = 0
    interval: tuple[float, float] | None = None
    """95 % Wilson interval of the test accuracy, for a single scored run."""
    majority: float | None = None
    train_seconds: float | None = None
    evaluation_seconds: float | None = None
    compile_seconds: float | None = None
    step_ms: float | None = None
    tokens_per_second: float | None = None
    speed_vs_softmax: float | None = None
    peak_memory_bytes: float | None = None
    parameters: int | None = None
    steps: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    row_counts: list[str] = field(default_factory=list)
    """Rows to train on / to validate / to test, as "96,000 / 2,000 / 2,000"."""
    memory_kinds: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    directions: list[str] = field(default_factory=list)
    device_names: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What the runs say must be known of their numbers."""

    @property
    def failures(self) -> str:
        """What did not end well, as ``FAIL`` or ``2 OOM, 1 INT``; empty where every run is ok."""
        bad = [(MARKS[status], count) for status, count in self.statuses.items() if status in MARKS]
        if not self.scored and len(bad) == 1 and bad[0][1] == 1:
            return bad[0][0]
        return ", ".join(f"{count} {mark}" for mark, count in bad)

    @property
    def stuck(self) -> bool:
        """Every scored run stayed at the majority class."""
        return self.scored > 0 and self.statuses.get("stuck", 0) == self.scored


@dataclass
class Section:
    """Columns of one block that are shown, and averaged, together."""

    block: str
    """Protocol of the columns, with hash and task version where the preset alone is not enough."""
    title: str
    columns: list[Column]
    cells: dict[tuple[str, Column], Cell]

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(backend for backend, _ in self.cells))

    def get(self, backend: str, column: Column) -> Cell | None:
        return self.cells.get((backend, column))

    def of(self, column: Column) -> list[Cell]:
        return [cell for (_, at), cell in self.cells.items() if at == column]

    @property
    def averaged(self) -> list[Column]:
        """The columns of the average: run by every backend, Path-X left out as in LRA, at least two."""
        columns = [
            column
            for column in self.columns
            if not column.path_x and all(self.get(backend, column) for backend in self.backends)
        ]
        return columns if len(columns) > 1 else []

    def average(self, backend: str) -> float | None:
        """Mean accuracy over ``averaged``; ``None`` where a cell has none: a failure is not a number."""
        cells = [self.get(backend, column) for column in self.averaged]
        values = [cell.accuracy for cell in cells if cell and cell.accuracy is not None]
        return sum(values) / len(values) if values and len(values) == len(cells) else None


def sections(cells: Iterable[Cell]) -> list[Section]:
    """Split cells into what may stand side by side: by protocol, then LRA's own lengths or one regime."""
    cells = list(cells)
    blocks: dict[tuple[str, ...], list[Column]] = {}
    for column, block in _blocks([cell.column for cell in cells]).items():
        blocks.setdefault(block, []).append(column)
    result = []
    for block, columns in sorted(blocks.items()):
        name = block[0] if len(block) == 1 else f"{block[0]} [{block[1]}, task version {block[2]}]"
        for title, chosen in _split(columns):
            inside = {(cell.backend, cell.column): cell for cell in cells if cell.column in chosen}
            result.append(Section(name, f"Protocol {name}: {title}", chosen, inside))
    return result


def _blocks(columns: list[Column]) -> dict[Column, tuple[str, ...]]:
    """The block of each column: its preset, or its exact settings where the preset was run with several.

    The protocol hash covers the task, so tasks of one preset differ in it by design. The same task and
    length under two hashes or task versions means that someone changed the preset: those stand apart.
    """
    variants: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for c in columns:
        variants.setdefault((c.protocol, c.label), set()).add((c.protocol_hash, c.task_version))
    apart = {(key[0], *variant) for key, found in variants.items() if len(found) > 1 for variant in found}
    order = sorted(set(columns), key=lambda c: c.order)
    exact = {c: (c.protocol, c.protocol_hash, c.task_version) for c in order}
    # rows of two input pipelines are two benchmarks: never averaged
    plain = {c: c.protocol if c.fidelity == "lra" else f"{c.protocol}, {c.fidelity} input" for c in order}
    return {c: exact[c] if exact[c] in apart else (plain[c],) for c in order}


def _split(columns: list[Column]) -> list[tuple[str, list[Column]]]:
    """LRA's own lengths together, then each regime that has other lengths too.

    A native column is repeated in its regime where the task has no other column there, so that a regime
    is complete; a native table that would only repeat others is left out.
    """
    native = [c for c in columns if c.native]
    regimes = {}
    for regime in REGIMES:
        inside = [c for c in columns if c.regime == regime]
        others = {c.task for c in inside if not c.native}
        if others:
            regimes[regime] = [c for c in inside if not c.native or c.task not in others]
    repeated = {c for inside in regimes.values() for c in inside}
    head = [("LRA's own lengths", native)] if set(native) - repeated else []
    return head + [(f"regime {regime}", inside) for regime, inside in regimes.items()]
