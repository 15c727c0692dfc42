"""The training loop: one for every mixer and every task."""

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from attention.base import Mixer
from lra import checkpoint
from lra.config import TrainerConfig
from lra.data.arrays import Split
from lra.data.loader import Batch, eval_indices, make_batch, train_indices
from lra.meter import Meter
from lra.optim import build_optimizer, learning_rate, set_learning_rate
from lra.tracking import Tracker

BEST_CHECKPOINT = Path("checkpoints") / "best.pt"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Outcome of one pass over a split; every row counts exactly once."""

    correct: int
    labels: int
    """Labels scored: one a row, or one for each output of a row."""
    loss: float
    """Mean cross-entropy in nats."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.labels


class Trainer:
    """Trains ``model`` on ``splits`` and keeps the checkpoint that the validation split prefers."""

    def __init__(
        self,
        model: nn.Module,
        splits: dict[str, Split],
        config: TrainerConfig,
        *,
        device: torch.device,
        meter: Meter,
        tracker: Tracker,
        run_dir: Path,
        data_seed: int,
    ) -> None:
        self.model = model.to(device)
        self.splits = splits
        self.config = config
        self.device = device
        self.meter = meter
        self.tracker = tracker
        self.best_path = run_dir / BEST_CHECKPOINT
        self.best: Score | None = None
        self.best_step = 0
        self._optimizer = build_optimizer(model, config)
        self._indices = train_indices(splits["train"], config.batch_size, data_seed)
        self._mixers = [m for m in model.modules() if isinstance(m, Mixer)]

    def fit(self) -> None:
        """Run all optimiser steps with validation in between; afterwards the model holds the best weights."""
        config = self.config
        self.model.train()
        self.meter.start()
        with tqdm(total=config.steps, unit="step", disable=None, dynamic_ncols=True) as bar:
            for step in range(1, config.steps + 1):
                with self.meter.account("data"):
                    batches = self._next_batches()
                loss, norm = self._timed_step(step, batches)
                bar.update()
                if step % config.log_every == 0 or step == config.steps:
                    with self.meter.account("logging"):
                        self._log_train(step, loss, norm, bar)
                if step % config.eval_every == 0 or step == config.steps:
                    self._validate(step, bar)
        self.best_step = checkpoint.load(self.best_path, self.model)

    def evaluate(self, split: str) -> Score:
        """Loss and accuracy over every row of a split."""
        self.model.eval()
        correct, loss = 0, 0.0
        with torch.inference_mode(), self._autocast():
            for indices in eval_indices(self.splits[split], self.config.batch_size):
                batch = make_batch(self.splits[split], indices, self.device)
                logits = self.model(batch.tokens, batch.key_mask).float()
                correct += int((logits.argmax(dim=-1) == batch.labels).sum())
                loss += float(_summed_loss(logits, batch.labels))
        self.model.train()
        labels = self.splits[split].labels.size
        return Score(correct, labels, loss / labels)

    def epochs(self, steps: int) -> float:
        """Passes over the training split after so many steps."""
        return steps * self.config.batch_size / len(self.splits["train"])

    def _next_batches(self) -> list[Batch]:
        parts = np.split(next(self._indices), self.config.accumulation)
        return [make_batch(self.splits["train"], part, self.device) for part in parts]

    def _timed_step(self, step: int, batches: list[Batch]) -> tuple[float, float]:
        real = sum(b.real_tokens for b in batches)
        with self.meter.step(real_tokens=real, padded_tokens=sum(b.padded_tokens for b in batches)):
            return self._step(step, batches)

    def _step(self, step: int, batches: list[Batch]) -> tuple[float, float]:
        """One update; returns the mean loss of the rows and the gradient norm before clipping."""
        for mixer in self._mixers:
            mixer.before_step(step)
        set_learning_rate(self._optimizer, learning_rate(self.config, step))
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        labels = sum(batch.labels.numel() for batch in batches)
        for batch in batches:
            with self._autocast():
                logits = self.model(batch.tokens, batch.key_mask)
            # summed and divided by the labels of the whole step: accumulation gives the gradient of one big batch
            loss = _summed_loss(logits.float(), batch.labels) / labels
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        value = total.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss is {value} at step {step}; the checkpoint of step {self.best_step} is the last good one. "
                f"Lower trainer.lr, raise trainer.warmup or set trainer.clip=1"
            )
        self._optimizer.step()
        return value, norm.item()

    def _validate(self, step: int, bar: tqdm) -> None:
        with self.meter.evaluation():
            score = self.evaluate("validation")
        with self.meter.account("logging"):
            self.tracker.log(step, {"val/loss": score.loss, "val/accuracy": score.accuracy})
            if self.best is None or score.accuracy > self.best.accuracy:
                self.best, self.best_step = score, step
                checkpoint.save(self.best_path, self.model, step=step)
            bar.set_postfix_str(f"val {100 * score.accuracy:.1f} %")
            log.debug("step %d: validation accuracy %.4f, loss %.4f", step, score.accuracy, score.loss)

    def _log_train(self, step: int, loss: float, norm: float, bar: tqdm) -> None:
        rate = learning_rate(self.config, step)
        values = {
            "train/loss": loss,
            "train/gradient_norm": norm,
            "train/learning_rate": rate,
            "train/epoch": self.epochs(step),
            "perf/step_ms": self.meter.recent_step_ms(self.config.log_every),
            "perf/train_seconds": self.meter.train_seconds,
        }
        self.tracker.log(step, values)
        bar.set_description_str(f"loss {loss:.3f}")
        log.debug("step %d: loss %.4f", step, loss)

    def _autocast(self) -> torch.autocast | nullcontext:
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of ``logits`` (..., K) against ``labels`` (...), summed."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def parameter_count(model: nn.Module) -> int:
    """Trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
