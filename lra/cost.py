"""What a set of runs will cost on this machine, from a measured probe of each distinct network.

Shapes: B rows, L tokens.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import lra.tasks
from lra.budget import Budget
from lra.config import RunConfig
from lra.errors import UserError
from lra.memory import trim_malloc
from lra.memory_limit import is_out_of_memory
from lra.meter import Meter
from lra.trainer import parameter_count
from lra.words import about, count
from models import build_model

VOCABULARY, CLASSES = 32, 10
"""Stand-ins: neither changes the cost of a step noticeably."""
RESOLUTION = 2**20
"""Bytes; the kernel counts a resident set in batches of pages, so that less is noise."""
FORWARD_SHARE = 1 / 3
"""A forward pass costs about a third of forward and backward."""


@dataclass(frozen=True)
class Estimate:
    """Cost of one run."""

    steps: int
    parameters: int
    seconds: float
    peak_bytes: int | None
    """Activations and gradients of one optimiser step at the longest row; ``None`` where not measurable."""


def probe(config: RunConfig, *, rows: int, length: int) -> tuple[float, int | None, int]:
    """Seconds and peak bytes of forward and backward over random ``(rows, length)`` ids, and the parameters."""
    device = torch.device(config.device)
    trim_malloc()  # what the probe before this one freed would be used again, and hide the peak
    task = lra.tasks.load(config.task.name)
    layout = task.layout(config.task)
    model = build_model(
        config.model,
        config.attention,
        vocab_size=VOCABULARY,
        num_classes=CLASSES,
        length=config.task.length,
        documents=layout.documents,
        outputs=layout.outputs,
        pixels=task.pixels(config.task),
    ).to(device)
    tokens = torch.randint(1, VOCABULARY, (rows * layout.documents, length), device=device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    meter = Meter(device, warmup_steps=1)
    meter.start()
    for _ in range(2):
        with meter.step(real_tokens=tokens.numel(), padded_tokens=tokens.numel()):
            with torch.autocast(device.type, torch.bfloat16, enabled=config.trainer.precision == "bf16"):
                logits = model(tokens, mask)
            logits = logits.float().flatten(0, -2)
            nn.functional.cross_entropy(logits, torch.arange(len(logits), device=device) % CLASSES).backward()
    meter.close_training_window()
    report = meter.report()
    return report["step_ms"] / 1e3, report["peak_memory_bytes"], parameter_count(model)


def estimate(config: RunConfig) -> Estimate:
    """Extrapolate a probe to all steps and validations of a run."""
    mean, longest, train_rows, validation_rows = _lengths(config)
    rows = config.trainer.batch_size // config.trainer.accumulation if config.device.startswith("cuda") else 1
    seconds, _, parameters = probe(config, rows=rows, length=mean)
    _, peak, _ = probe(config, rows=1, length=longest)
    per_row = seconds / rows
    batch = config.trainer.batch_size
    steps = _steps(config, train_rows, mean, per_row * batch)
    validations = math.ceil(steps / config.trainer.eval_every)
    total = per_row * (steps * batch + FORWARD_SHARE * validations * validation_rows)
    micro_batch = batch // config.trainer.accumulation
    return Estimate(steps, parameters, total, None if peak is None else peak * micro_batch)


def _steps(config: RunConfig, train_rows: int, mean: int, step_seconds: float) -> int:
    """Optimiser steps that the budget of a run comes to."""
    trainer = config.trainer
    steps = Budget(trainer, train_rows).steps if train_rows else trainer.steps
    if trainer.tokens:
        steps = trainer.tokens / (mean * trainer.batch_size)
    elif trainer.seconds:
        steps = trainer.seconds / step_seconds
    if trainer.time_limit:
        steps = min(steps, trainer.time_limit / step_seconds)
    return max(1, math.ceil(steps))


def _lengths(config: RunConfig) -> tuple[int, int, int, int]:
    """Mean and longest training row, training and validation rows; before the data is there, the longest possible."""
    try:
        _, splits = lra.tasks.load(config.task.name).load(config.task, Path(config.data_dir))
    except UserError:
        return config.task.length, config.task.length, 0, 0
    lengths = splits["train"].lengths
    return round(float(lengths.mean())), int(lengths.max()), len(splits["train"]), len(splits["validation"])


def describe_cost(configs: list[RunConfig]) -> str:
    """A line per run and the sum."""
    known: dict[str, Estimate] = {}
    lines, total = [], 0.0
    for config in tqdm(configs, desc="timing a few rows of each network", unit="run", disable=None, leave=False):
        key = config.fingerprint(without=("seed",))
        if key not in known:
            known[key] = _estimate(config)
        cost = known[key]
        total += cost.seconds
        lines.append(
            f"  {config.attention.name:<10} {config.task.name}@{config.task.length:<6} seed {config.seed:<3} "
            f"{cost.steps:>7,} {'step ' if cost.steps == 1 else 'steps'} x {count(config.trainer.batch_size, 'row')}  "
            f"{cost.parameters:>11,} parameters  {about(cost.seconds):>18}  {_memory(config, cost)}"
        )
    head = (
        f"{count(len(configs), 'run')} on {configs[0].device}, extrapolated from one or a few rows timed on this "
        f"machine;\nmemory is one step at the longest row, with all its rows at once:"
    )
    return "\n".join([head, *lines, f"  in all {about(total)}"])


def _estimate(config: RunConfig) -> Estimate:
    """``estimate``; ``UserError`` for a network that does not fit into memory."""
    try:
        return estimate(config)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error).strip() or "out of memory").splitlines()[0]
        raise UserError(
            f"attention={config.attention.name} task.length={config.task.length} model.width={config.model.width}: one "
            f"row does not fit into the memory of {config.device} ({first}); lower model.width or task.length"
        ) from None


def _memory(config: RunConfig, cost: Estimate) -> str:
    if cost.peak_bytes is None:
        return "memory unknown"
    # of a row, as the probe has one
    least = RESOLUTION * (config.trainer.batch_size // config.trainer.accumulation)
    if not config.device.startswith("cuda") and cost.peak_bytes < least:
        return f"< {_size(least)}"
    return _size(cost.peak_bytes)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
