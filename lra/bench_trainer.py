"""What trainer and meter cost: beside a bare loop over the same model and batches, in turn in one process.

``scripts/bench_trainer``. Shapes: B rows, L tokens.
"""

import argparse
import copy
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import attention
from lra.budget import Budget, Spent
from lra.checkpoint import Checkpoints
from lra.config import RunConfig, compose_run
from lra.data.arrays import Split
from lra.data.loader import make_batch, train_indices
from lra.errors import UserError
from lra.meter import Meter, timed, tune_allocator
from lra.optim import build_optimizer, learning_rate, set_learning_rate
from lra.tracking import Tracker
from lra.trainer import Trainer
from models import build_model

VOCABULARY, CLASSES, ROWS, SEED = 32, 10, 512, 0
WARMUP_ROUNDS = 2
METER_CALLS, METER_BLOCKS = 250, 20
MOST_SLOWER, MOST_METER = 0.02, 0.005
"""Promised: the trainer's time above the bare loop's, the meter's share of a step."""


@dataclass(frozen=True)
class Outcome:
    """Seconds a step in every round, and of the meter alone."""

    trainer: list[float]
    bare: list[float]
    meter: float

    @property
    def ratios(self) -> list[float]:
        """Trainer over bare loop, round by round."""
        return [t / b for t, b in zip(self.trainer, self.bare)]


class Bare:
    """The loop that one writes by hand: no accounts, no accumulation, no logging."""

    def __init__(self, model: nn.Module, split: Split, config: RunConfig, device: torch.device) -> None:
        self.model, self.split, self.config, self.device = model.to(device).train(), split, config.trainer, device
        self.optimizer = build_optimizer(model, self.config)
        self.budget = Budget(self.config, len(split))
        self.indices = train_indices(split, self.config.batch_size, SEED)

    def run(self, first: int, count: int) -> float:
        """Steps ``first`` and following; the last loss."""
        for step in range(first, first + count):
            batch = make_batch(self.split, next(self.indices), self.device)
            rate = learning_rate(self.config, step, self.budget.decay(step, Spent()))
            set_learning_rate(self.optimizer, rate)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
                logits = self.model(batch.tokens, batch.key_mask)
            loss = cross_entropy(logits.float(), batch.labels)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            value = loss.item()
        return value


class Ours:
    """The trainer with its meter and its log, without validation."""

    def __init__(
        self, model: nn.Module, split: Split, config: RunConfig, device: torch.device, tracker: Tracker, folder: Path
    ) -> None:
        self.bar = tqdm(disable=True)
        self.trainer = Trainer(
            model,
            {"train": split},
            config.trainer,
            num_classes=CLASSES,
            device=device,
            meter=Meter(device, warmup_steps=0),
            tracker=tracker,
            checkpoints=Checkpoints(folder, ""),
            data_seed=SEED,
        )
        self.trainer.model.train()
        self.trainer.meter.start()

    def run(self, first: int, count: int) -> float:
        """Steps ``first`` and following; the last loss, which is logged."""
        for _ in range(count):
            self.trainer._advance(self.bar)
        return self.trainer._pending["train/loss"]


def rows(length: int) -> Split:
    """Random tokens, ``length / 2`` to ``length`` a row."""
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(length - length // 2, length + 1, ROWS)
    tokens = rng.integers(1, VOCABULARY, lengths.sum(), dtype=np.uint8)
    return Split(tokens, np.concatenate(([0], np.cumsum(lengths))), rng.integers(0, CLASSES, ROWS))


def meter_seconds(device: torch.device) -> float:
    """What the meter takes in one step, median of blocks; the first one is a warm-up."""
    meter = Meter(device, warmup_steps=0)

    def steps() -> None:
        for _ in range(METER_CALLS):
            with meter.account("data"):
                pass
            with meter.step(real_tokens=1, padded_tokens=1, shapes=[(1, 1)]):
                meter.lap("forward")
                meter.lap("backward")

    blocks = [timed(device, steps) for _ in range(METER_BLOCKS + 1)]
    return statistics.median(blocks[1:]) / METER_CALLS


def measure(config: RunConfig, *, rounds: int, steps: int) -> Outcome:
    """``rounds`` of ``steps`` steps on each side, the first one of a round alternating; losses must agree."""
    device, split = torch.device(config.device), rows(config.task.length)
    torch.manual_seed(SEED)
    model = build_model(
        config.model, config.attention, vocab_size=VOCABULARY, num_classes=CLASSES, length=config.task.length
    )
    with tempfile.TemporaryDirectory() as name, Tracker(config, Path(name)) as tracker:
        bare = Bare(copy.deepcopy(model), split, config, device)
        sides = {"trainer": Ours(model, split, config, device, tracker, Path(name)), "bare": bare}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for i in tqdm(range(WARMUP_ROUNDS + rounds), unit="round", disable=None, leave=False):
            losses = {}

            def block(name: str, first: int = 1 + i * steps, losses: dict[str, float] = losses) -> None:
                losses[name] = sides[name].run(first, steps)

            for name in sorted(sides, reverse=i % 2 == 0):
                taken = timed(device, lambda name=name: block(name)) / steps
                if i >= WARMUP_ROUNDS:
                    seconds[name].append(taken)
            if abs(losses["trainer"] - losses["bare"]) > 1e-3 * abs(losses["bare"]):
                raise RuntimeError(f"the two loops do not do the same work: their losses are {losses}")
    return Outcome(**seconds, meter=meter_seconds(device))


def report(config: RunConfig, outcome: Outcome) -> str:
    """The figures and what was promised, in four lines."""
    low, middle, high = statistics.quantiles(outcome.ratios, n=4, method="inclusive")
    step = statistics.median(outcome.bare)
    share = outcome.meter / step
    return "\n".join(
        [
            f"{config.attention.name}, {config.trainer.batch_size} rows of {config.task.length // 2} to "
            f"{config.task.length} tokens, {config.device}, {torch.get_num_threads()} threads, "
            f"{len(outcome.bare)} rounds",
            f"bare loop {1e3 * step:.2f} ms/step, trainer {1e3 * statistics.median(outcome.trainer):.2f} ms/step",
            f"trainer / bare {middle:.4f}, quartiles {low:.4f} to {high:.4f} (promised: at most {1 + MOST_SLOWER})",
            f"meter {1e6 * outcome.meter:.1f} us/step, {100 * share:.3f} % of a step "
            f"(promised: below {100 * MOST_METER} %)",
        ]
    )


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench_trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=list(attention.REGISTRY), default="flash")
    parser.add_argument("--device", default="auto")
    for name, default in (("length", 128), ("batch", 32), ("steps", 20), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 2:
        raise UserError("--steps takes 1 or more, --rounds 2 or more")
    tune_allocator()
    # one more than there are, so that the trainer does not come to the end
    steps = max(100, (WARMUP_ROUNDS + options.rounds) * options.steps + 1)
    config = compose_run(
        [
            "task=listops",
            "trainer=quick",
            "tracking=disabled",
            "model.dropout=0",  # both loops draw from one generator
            f"attention={options.attention}",
            f"task.length={options.length}",
            f"trainer.batch_size={options.batch}",
            f"trainer.log_every={options.steps}",
            f"trainer.steps={steps}",
            f"trainer.eval_every={steps}",
            f"device={options.device}",
        ]
    )
    print(report(config, measure(config, rounds=options.rounds, steps=options.steps)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
