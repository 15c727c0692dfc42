"""The result of a run as one typed row, and where rows live on disk."""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

SCHEMA_VERSION = 1
STATUSES = ("ok", "failed", "oom", "stuck", "interrupted")
RESULT_FILE = "result.json"

log = logging.getLogger(__name__)


@dataclass
class Accounts:
    """Wall-clock seconds of a run, each in one account only; ``None`` where it was not measured."""

    data: float | None = None
    compute: float | None = None
    evaluation: float | None = None
    logging: float | None = None
    compile: float | None = None


@dataclass
class ResultRow:
    """Everything the table needs, with its provenance. Unknown is ``None``, never 0. Accuracies are in [0, 1]."""

    run_id: str
    status: str
    task: str
    attention: str
    seed: int
    length: int
    regime: str
    config_hash: str
    """Hash of the resolved config fields that change numbers."""
    protocol_hash: str
    """The same without attention and seed: rows of one protocol may be compared."""
    protocol: str
    """Name of the preset that the protocol started from."""
    schema: int = SCHEMA_VERSION
    error: str | None = None
    task_version: str | None = None

    steps: int | None = None
    """Optimiser steps done."""
    batch_size: int | None = None
    epochs: float | None = None
    validation_accuracy: float | None = None
    """At the checkpoint that validation chose."""
    selected_step: int | None = None
    test_accuracy: float | None = None
    """Measured once, at the selected checkpoint."""
    test_rows: int | None = None
    test_interval: list[float] | None = None
    """95 % Wilson interval of the test accuracy."""
    majority_baseline: float | None = None

    seconds: Accounts = field(default_factory=Accounts)
    step_ms: float | None = None
    """Median optimiser step (forward, backward, update), warm-up dropped."""
    step_ms_quartiles: list[float] | None = None
    warmup_steps_dropped: int | None = None
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    """Real tokens, padding not counted."""
    padded_share: float | None = None
    """Share of the processed positions that were padding."""
    peak_memory_bytes: int | None = None
    """Training peak above what the process held before the model was built; see ``memory_kind``."""
    memory_kind: str | None = None
    parameters: int | None = None
    flops_per_step: float | None = None

    kernel: str | None = None
    """What really ran."""
    dtype: str | None = None
    device: str | None = None
    device_name: str | None = None
    environment: dict = field(default_factory=dict)
    git: dict = field(default_factory=dict)
    started: str | None = None
    finished: str | None = None

    @property
    def train_seconds(self) -> float | None:
        """Wall-clock of training: data and optimiser steps, without evaluation and logging."""
        parts = (self.seconds.data, self.seconds.compute)
        return None if None in parts else sum(parts)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}, expected one of {', '.join(STATUSES)}")
        if self.schema != SCHEMA_VERSION:
            raise ValueError(f"schema is {self.schema}, this version reads {SCHEMA_VERSION}")


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a crash, sees the old file or the new one and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save(row: ResultRow, run_dir: Path) -> None:
    """Write ``row`` as ``run_dir/result.json``, atomically."""
    write_atomic(run_dir / RESULT_FILE, json.dumps(asdict(row), indent=2, allow_nan=False) + "\n")


def load(path: Path) -> ResultRow:
    """Read one ``result.json``; ``ValueError`` says what is wrong with it."""
    try:
        raw = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"holds a {type(raw).__name__}, expected an object")
    known = {f.name: f for f in fields(ResultRow)}
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ValueError(f"has unknown keys {', '.join(unknown)}")
    required = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    missing = sorted(required - set(raw))
    if missing:
        raise ValueError(f"lacks the keys {', '.join(missing)}")
    for name in ("validation_accuracy", "test_accuracy", "majority_baseline"):
        value = raw.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise ValueError(f"{name} is {value!r}, expected a number in [0, 1] or null")
    seconds = raw.get("seconds", {})
    if not isinstance(seconds, dict) or set(seconds) - {f.name for f in fields(Accounts)}:
        raise ValueError(f"seconds is {seconds!r}, expected the accounts {[f.name for f in fields(Accounts)]}")
    return ResultRow(**{**raw, "seconds": Accounts(**seconds)})


def load_all(runs_dir: Path) -> Iterator[ResultRow]:
    """Every readable row below ``runs_dir``, in name order; a corrupt one is skipped with a warning."""
    for path in sorted(runs_dir.glob(f"[!.]*/{RESULT_FILE}")):
        try:
            yield load(path)
        except (OSError, ValueError, TypeError) as error:
            log.warning("skipped %s: it %s", path, error)
