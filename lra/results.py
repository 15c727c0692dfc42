"""The result of a run as one typed row, and where rows live on disk."""

import json
import logging
import math
import os
import tempfile
import types
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 2
STATUSES = ("ok", "failed", "oom", "stuck", "interrupted")
SCORED = ("ok", "stuck")
"""Statuses of a finished run; it has a test accuracy."""
RESULT_FILE = "result.json"
MAX_LENGTH = 2**31 - 1
MAX_INTEGER = 2**63 - 1

log = logging.getLogger(__name__)


@dataclass
class Accounts:
    """Wall-clock seconds of a run, each in one account only; ``None`` where it was not measured."""

    data: float | None = None
    compute: float | None = None
    evaluation: float | None = None
    logging: float | None = None
    compile: float | None = None
    """torch.compile and the building of C++ kernels."""


@dataclass
class Parts:
    """What ``compute`` consists of; ``None`` where it was not told apart."""

    forward: float | None = None
    backward: float | None = None
    optimizer: float | None = None
    """Clipping and the update."""


@dataclass
class Memory:
    """Bytes; ``None`` where it was not measured. The training peak itself is ``ResultRow.peak_memory_bytes``."""

    weights: int | None = None
    """Parameters and buffers."""
    gradients: int | None = None
    optimizer: int | None = None
    activations: int | None = None
    """What the training peak holds besides: activations, the batch, workspaces."""
    evaluation_peak: int | None = None
    training_reserved: int | None = None
    """CUDA: held by torch's allocator at most, fragments included."""
    evaluation_reserved: int | None = None
    training_device: int | None = None
    """CUDA: taken of the device at most, context and other processes included."""
    evaluation_device: int | None = None


@dataclass
class ResultRow:
    """All that the table needs, with its provenance. Unknown is ``None``, never 0; accuracies are shares."""

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
    attention_hash: str | None = None
    """Hash of the resolved attention options: seeds are averaged only where it is equal."""
    error: str | None = None
    task_version: str | None = None
    fidelity: str | None = None
    """Whose input pipeline the rows follow: ``lra`` or ``s4``."""
    data_source: str | None = None
    rows: dict = field(default_factory=dict)
    """Rows of each split."""
    lengths: dict = field(default_factory=dict)
    """True lengths of the training sequences in tokens: quantiles and a histogram."""
    warnings: list[str] = field(default_factory=list)
    """What a reader of the numbers must know."""

    steps: int | None = None
    """Optimiser steps done."""
    batch_size: int | None = None
    accumulation: int | None = None
    """Micro-batches a step, as it ended."""
    ranks: int | None = None
    """Processes that trained together."""
    resumable: bool = False
    """Whether the same command goes on from a checkpoint."""
    oom_rows: int | None = None
    """Rows at once when memory ended."""
    oom_length: int | None = None
    """Tokens of the longest of them."""
    epochs: float | None = None
    validation_accuracy: float | None = None
    """At the checkpoint that validation chose."""
    selected_step: int | None = None
    test_accuracy: float | None = None
    """Measured once, at the selected checkpoint."""
    test_loss: float | None = None
    """Mean cross-entropy in nats."""
    test_per_class: list[float | None] = field(default_factory=list)
    """Accuracy by class; ``None`` for a class that does not occur in the test split."""
    test_calibration_error: float | None = None
    """Expected calibration error over 15 bins."""
    test_labels: int | None = None
    """Labels scored: one a row of the test split, or one for each output of a row."""
    test_interval: list[float] | None = None
    """95 % Wilson interval of the test accuracy."""
    majority_baseline: float | None = None

    seconds: Accounts = field(default_factory=Accounts)
    step_ms: float | None = None
    """Median optimiser step (forward, backward, update), warm-up dropped."""
    step_ms_quartiles: list[float] | None = None
    warmup_steps_dropped: int | None = None
    compiling_steps_dropped: int | None = None
    """Steps after the warm-up in which torch.compile was at work; ``None`` without torch.compile."""
    compiled_graphs: int | None = None
    graph_breaks: int | None = None
    compute_seconds: Parts = field(default_factory=Parts)
    """What ``seconds.compute`` consists of."""
    compute_ms: Parts = field(default_factory=Parts)
    """The same of the median step."""
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    """Real tokens, padding not counted."""
    padded_tokens_per_second: float | None = None
    """Positions processed, padding included."""
    padded_share: float | None = None
    """Share of the processed positions that were padding."""
    peak_memory_bytes: int | None = None
    """Training peak above what the process held before the model was built; see ``memory_kind``."""
    memory_kind: str | None = None
    memory: Memory = field(default_factory=Memory)
    train_energy_joules: float | None = None
    """Of the whole GPU, evaluation left out."""
    parameters: int | None = None
    flops_per_step: float | None = None
    """Forward and backward of the mean timed step: what ``lra.flops`` counts, not what a kernel happened to do."""
    matmul_flops_per_second: float | None = None
    """Measured peak of the device in the run's precision."""
    model_flops_utilisation: float | None = None
    """``flops_per_step`` times ``steps_per_second``, as a share of the matmul peak."""

    kernel: str | None = None
    """What really ran."""
    direction: str | None = None
    """``causal`` or ``bidirectional``: whether a position sees what comes after it."""
    dtype: str | None = None
    device: str | None = None
    device_name: str | None = None
    environment: dict = field(default_factory=dict)
    git: dict = field(default_factory=dict)
    started: str | None = None
    finished: str | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"has status {self.status!r}, expected one of {', '.join(STATUSES)}")
        if self.schema != SCHEMA_VERSION:
            raise ValueError(f"has schema {self.schema} of another version of this program, not {SCHEMA_VERSION}")

    @property
    def train_seconds(self) -> float | None:
        """Wall-clock of training: data and optimiser steps, without evaluation and logging."""
        parts = (self.seconds.data, self.seconds.compute)
        return None if None in parts else sum(parts)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` so that a reader, or a crash, sees the old file or the new one and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
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
    if not path.is_file():  # a pipe would be waited for without end
        raise ValueError("is not there, or no file")
    try:
        raw = json.loads(path.read_bytes(), parse_constant=_refuse_constant, parse_int=_integer)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError("is not valid JSON of a result (nested too deeply)") from None
    row = _build(ResultRow, raw)
    _check_ranges(row)
    return row


def load_all(runs_dir: Path) -> Iterator[ResultRow]:
    """Every readable row below ``runs_dir``, in name order; a corrupt one is skipped with a warning."""
    for path in sorted(runs_dir.glob(f"[!.]*/{RESULT_FILE}")):
        try:
            yield load(path)
        except OSError as error:
            log.warning("skipped %s: it cannot be read (%s)", path, error.strerror)
        except ValueError as error:
            log.warning("skipped %s: it %s", path, error)


def finished_at(row: ResultRow) -> datetime:
    """When the run ended, UTC where no zone is given; the beginning of time where it is unknown."""
    if row.finished is None:
        return datetime.min.replace(tzinfo=UTC)
    time = datetime.fromisoformat(row.finished)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, expected a finite number or null")


def _integer(text: str) -> int:
    value = int(text) if len(text) <= len(str(-MAX_INTEGER)) else None
    if value is None or abs(value) > MAX_INTEGER:
        raise ValueError(f"holds a number of {len(text)} digits, expected one of 64 bits")
    return value


def _build(kind: type, raw: object, where: str = "") -> Any:  # noqa: ANN401
    """A dataclass from parsed JSON, every key known, none missing, every value of its declared type."""
    if not isinstance(raw, dict):
        raise ValueError(f"holds a {type(raw).__name__} {where}".rstrip() + ", expected an object")
    hints = get_type_hints(kind)
    unknown = sorted(set(raw) - set(hints))
    if unknown:
        raise ValueError(f"has unknown keys {', '.join(where + name for name in unknown)}")
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    missing = sorted(required - set(raw))
    if missing:
        raise ValueError(f"lacks the keys {', '.join(where + name for name in missing)}")
    values = dict(raw)
    for name, value in raw.items():
        if is_dataclass(hints[name]):
            values[name] = _build(hints[name], value, f"{name}.")
        elif not _fits(value, hints[name]):
            expected = getattr(hints[name], "__name__", str(hints[name]))
            raise ValueError(f"has {where}{name} = {value!r}, expected {expected}")
    return kind(**values)


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401
    """Whether a parsed JSON value is of the declared type; an int passes as float, a bool never."""
    if get_origin(hint) is types.UnionType:
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _check_ranges(row: ResultRow) -> None:
    """Refuse what no run can have measured: a share outside [0, 1], a negative amount, an unreadable time."""
    shares = ("validation_accuracy", "test_accuracy", "majority_baseline", "padded_share")
    for name in shares:
        value = getattr(row, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"has {name} = {value!r}, expected a number in [0, 1] or null")
    amounts = asdict(row)
    for nested in ("seconds", "compute_seconds", "compute_ms", "memory"):
        amounts |= {f"{nested}.{name}": value for name, value in amounts[nested].items()}
    for name, value in amounts.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"has {name} = {value!r}, expected a finite number or null")
        if name != "seed" and isinstance(value, int | float) and value < 0:
            raise ValueError(f"has {name} = {value!r}, expected no negative number")
    for name in ("test_interval", "step_ms_quartiles"):
        value = getattr(row, name)
        if value is not None and (len(value) != 2 or value[0] > value[1]):
            raise ValueError(f"has {name} = {value!r}, expected [low, high]")
    if row.test_interval is not None and not 0 <= row.test_interval[0] <= row.test_interval[1] <= 1:
        raise ValueError(f"has test_interval = {row.test_interval!r}, expected shares in [0, 1]")
    if row.status in SCORED and row.test_accuracy is None:
        raise ValueError(f"has status {row.status!r} without a test_accuracy")
    if not row.task or not row.attention or not 1 <= row.length <= MAX_LENGTH:
        raise ValueError(
            f"has task {row.task!r}, attention {row.attention!r} and length {row.length}, "
            f"expected names and a length of 1 to {MAX_LENGTH}"
        )
    try:
        finished_at(row)
    except ValueError:
        raise ValueError(f"has finished = {row.finished!r}, expected an ISO 8601 time") from None
