"""The training loop: one for every mixer and every task.

Shapes: B batch, K classes.
"""

import logging
import math
from contextlib import nullcontext
from dataclasses import asdict

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from attention.base import Mixer
from lra.budget import Budget, Spent
from lra.checkpoint import Checkpoints, load_weights, restore_rng, rng_state
from lra.data.arrays import Split
from lra.data.loader import Batch, make_batch, padded_tokens, train_indices
from lra.diagnosis import NotFinite, culprit, describe_rows
from lra.distributed import ALONE, Ranks
from lra.evaluation import Predictions, Score, predict
from lra.memory_limit import OutOfMemory, is_out_of_memory
from lra.meter import Meter
from lra.optim import build_optimizer, learning_rate, set_learning_rate
from lra.protocol import TrainerConfig
from lra.stop import Stop
from lra.tracking import Tracker

log = logging.getLogger(__name__)


class Trainer:
    """Trains ``model`` on ``splits`` and keeps the weights that the validation split prefers."""

    def __init__(
        self,
        model: nn.Module,
        splits: dict[str, Split],
        config: TrainerConfig,
        *,
        num_classes: int,
        device: torch.device,
        meter: Meter,
        tracker: Tracker,
        checkpoints: Checkpoints,
        data_seed: int,
        ranks: Ranks = ALONE,
        stop: Stop | None = None,
    ) -> None:
        self.model = model.to(device)
        self.splits = splits
        self.config = config
        self.num_classes = num_classes
        self.device = device
        self.meter = meter
        self.tracker = tracker
        self.checkpoints = checkpoints
        self.ranks = ranks
        self.stop = stop or Stop()
        self.budget = Budget(config, len(splits["train"]))
        self.accumulation = config.accumulation
        self.step = 0
        self.best: Score | None = None
        self.best_step = 0
        self._validated = True
        self._updating = False
        self.notes: list[str] = []
        """What a reader of the result must know of how it came about."""
        self._pending: dict[str, float | None] = {}
        """Values of the current step that are not logged yet."""
        self._optimizer = build_optimizer(model, config)
        meter.track(model, self._optimizer)
        self._indices = train_indices(splits["train"], config.batch_size, data_seed)
        self._mixers = [m for m in model.modules() if isinstance(m, Mixer)]
        model.encoder.activation_checkpointing = config.activation_checkpointing
        if config.compile:
            model.compile(dynamic=True)
        self._network = model
        if ranks.world > 1:
            self._network = DistributedDataParallel(model)

    def fit(self) -> None:
        """Make all steps with validation in between; afterwards the model holds the best weights."""
        self.model.train()
        self.meter.start()
        disable = None if self.ranks.first else True
        # the start of its thread would wait for ever where a memory limit leaves none for it
        tqdm.monitor_interval = 0
        with tqdm(total=self.budget.steps, initial=self.step, unit="step", disable=disable, dynamic_ncols=True) as bar:
            try:
                with self.stop.deferred():
                    while self._advance(bar):
                        pass
            except KeyboardInterrupt:
                # a second signal may have cut an update in two: the checkpoint before it stays the last
                if self.step and not self._updating:
                    self._save()
                raise
        self.best_step = load_weights(self.checkpoints.best(self.best_step), self.model)

    def restore(self, state: dict) -> None:
        """Go on from a checkpoint of ``Checkpoints.latest``, as if nothing had happened."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._validated = state["step"], state["validated"]
        self._pending = dict(state["pending"])
        self.accumulation = state["accumulation"]
        self.notes = [*state["notes"], f"resumed at step {self.step}"]
        if state["best"]:
            fields = dict(state["best"])
            self.best_step = fields.pop("step")
            self.best = Score(**fields)
        self.meter.restore(state["meter"])
        restore_rng(state["rng"][self.ranks.rank], self.device)
        for _ in range(self.step):
            next(self._indices)

    def predict(self, split: str) -> Predictions:
        """What the model says of every row of a split."""
        return predict(
            self.model,
            self.splits[split],
            rows_at_once=max(1, self.config.batch_size // self.accumulation),
            device=self.device,
            autocast=self._autocast,
            ranks=self.ranks,
            between=self._check_stop,
        )

    def evaluate(self, split: str) -> Score:
        """Loss and accuracy over every row of a split."""
        return self.predict(split).score(self.num_classes)

    def spent(self) -> Spent:
        """Steps, real tokens and seconds of training so far."""
        seconds = self.meter.train_seconds
        if self.config.seconds or self.config.time_limit:
            seconds = self.ranks.of_first(seconds, self.device)
        return Spent(self.step, self.meter.real_tokens, seconds)

    def epochs(self, steps: int) -> float:
        """Passes over the training split after so many steps."""
        return steps * self.config.batch_size / len(self.splits["train"])

    def _advance(self, bar: tqdm) -> bool:
        """What is due next: validate, end, or one optimiser step. False when training is over."""
        over = self.budget.done(self.spent())
        if not self._validated and (over or self.step % self.config.eval_every == 0):
            self._validate(bar)
        self._flush()
        if over:
            self._save()
            return False
        if self._validated and self.step and self.step % self.config.eval_every == 0:
            self._save()
        self._check_stop()
        with self.meter.account("data"):
            indices = next(self._indices)
        rate = learning_rate(self.config, self.step + 1, self.budget.decay(self.step + 1, self.spent()))
        loss, norm = self._attempt(self.step + 1, indices, rate)
        self.step, self._validated, self._updating = self.step + 1, False, False
        bar.update()
        if self.step % self.config.log_every == 0 or self.budget.done(self.spent()):
            self._pending = self._train_values(loss, norm, rate)
            bar.set_description_str(f"loss {loss:.3f}")
        return True

    def _attempt(self, step: int, indices: np.ndarray, rate: float) -> tuple[float, float]:
        """One step; where memory ends and the protocol says so, again with half the rows at once."""
        while True:
            rng = rng_state(self.device)
            try:
                split = self.splits["train"]
                with self.meter.account("data"):
                    parts = self._parts(indices)
                    batches = self._batches(parts)
                real, padded = padded_tokens(split, parts)
                shapes = [(len(part) * split.documents, int(split.lengths[part].max())) for part in parts]
                with self.meter.step(real_tokens=real, padded_tokens=padded, shapes=shapes):
                    return self._step(step, batches, indices, rate)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and not self._updating:
                    restore_rng(rng, self.device)  # the step will be made again
                if not is_out_of_memory(error):
                    raise
                rows = max(1, self.config.batch_size // self.ranks.world // self.accumulation)
                if self.config.on_oom == "fail" or rows == 1 or self._updating:
                    length = int(self.splits["train"].lengths[indices].max())
                    raise OutOfMemory(error, rows=rows, length=length) from error
            # outside the handler: the traceback would keep the tensors of the failed attempt alive
            batches = None
            self._optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            restore_rng(rng, self.device)
            self.accumulation = min(2 * self.accumulation, self.config.batch_size)
            self.notes.append(f"out of memory with {rows} rows at once at step {step}: went on with half of them")
            log.warning("%s", self.notes[-1])

    def _parts(self, indices: np.ndarray) -> list[np.ndarray]:
        """Rows of every micro-batch of every rank."""
        world = self.ranks.world
        return [part for rank in range(world) for part in np.array_split(indices[rank::world], self.accumulation)]

    def _batches(self, parts: list[np.ndarray]) -> list[Batch]:
        """The micro-batches of this rank."""
        mine = parts[self.ranks.rank * self.accumulation :][: self.accumulation]
        return [make_batch(self.splits["train"], part, self.device) for part in mine]

    def _step(self, step: int, batches: list[Batch], indices: np.ndarray, rate: float) -> tuple[float, float]:
        """One update; returns the mean loss of the labels and the gradient norm before clipping."""
        for mixer in self._mixers:
            mixer.before_step(step)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        labels = self.splits["train"].labels[indices].size
        for number, batch in enumerate(batches, 1):
            # with several ranks only between steps: the others would wait for this one
            early = self.stop.interruptible() if self.ranks.world == 1 else nullcontext()
            with early, self._synchronised(number == len(batches)):
                with self._autocast():
                    logits = self._network(batch.tokens, batch.key_mask)
                # summed and divided by the labels of the whole step: parts give the gradient of one big batch
                loss = _summed_loss(logits.float(), batch.labels) / labels
                self.meter.lap("forward")
                # DistributedDataParallel averages over the ranks where a sum is wanted
                (loss * self.ranks.world).backward()
                self.meter.lap("backward")
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf).item()
        value = self.ranks.sum(total).item()
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise self._not_finite(step, value, norm, batches, indices)
        # from here on the step cannot be repeated
        self._updating = True
        self._optimizer.step()
        return value, norm

    def _synchronised(self, last: bool) -> object:
        """Gradients are exchanged between the ranks once a step, with the last micro-batch."""
        return nullcontext() if last or self.ranks.world == 1 else self._network.no_sync()

    def _not_finite(self, step: int, loss: float, norm: float, batches: list[Batch], indices: np.ndarray) -> NotFinite:
        rows = sorted(indices.tolist())
        where = culprit(self.model, batches, self._autocast)
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        log.debug("rows of the batch of step %d: %s", step, rows)
        good = f"step {self.best_step}, {self.checkpoints.best(self.best_step)}" if self.best else "none"
        return NotFinite(
            f"{what} at step {step}, first seen in the {where}, training rows {describe_rows(rows)}; last good "
            f"checkpoint: {good}. Lower trainer.lr, raise trainer.warmup or set trainer.clip=1"
        )

    def _check_stop(self) -> None:
        if self.ranks.any(self.stop.requested, self.device):
            raise KeyboardInterrupt

    def _validate(self, bar: tqdm) -> None:
        with self.meter.evaluation():
            score = self.evaluate("validation")
        self._validated = True
        self._pending |= {"val/loss": score.loss, "val/accuracy": score.accuracy}
        with self.meter.account("logging"):
            if self.best is None or score.accuracy > self.best.accuracy:
                self.best, self.best_step = score, self.step
                if self.ranks.first:
                    self.checkpoints.save_best(self.step, self.model)
            bar.set_postfix_str(f"val {100 * score.accuracy:.1f} %")
            # the bar of a terminal says the same
            level = logging.DEBUG if bar.disable is False else logging.INFO
            of = f" of {self.budget.steps}" if self.budget.steps else ""
            text = "step %d%s, %.0f s of training: validation accuracy %.2f %%, loss %.4f"
            log.log(level, text, self.step, of, self.meter.train_seconds, 100 * score.accuracy, score.loss)

    def _flush(self) -> None:
        """Log what the current step has to say: one line a step."""
        if self._pending:
            with self.meter.account("logging"):
                self.tracker.log(self.step, self._pending)
            self._pending = {}

    def _save(self) -> None:
        with self.meter.account("logging"):
            rng = self.ranks.gather(rng_state(self.device))
            if self.ranks.first:
                self.checkpoints.save(
                    {
                        "step": self.step,
                        "validated": self._validated,
                        "pending": self._pending,
                        "best": {"step": self.best_step, **asdict(self.best)} if self.best else None,
                        "accumulation": self.accumulation,
                        "notes": self.notes,
                        "model": self.model.state_dict(),
                        "optimizer": self._optimizer.state_dict(),
                        "meter": self.meter.state(),
                        "rng": rng,
                    }
                )

    def _train_values(self, loss: float, norm: float, rate: float) -> dict[str, float | None]:
        log.debug("step %d: loss %.4f", self.step, loss)
        return {
            "train/loss": loss,
            "train/gradient_norm": norm,
            "train/learning_rate": rate,
            "train/epoch": self.epochs(self.step),
            "perf/step_ms": self.meter.recent_step_ms(self.config.log_every),
            "perf/train_seconds": self.meter.train_seconds,
        }

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
