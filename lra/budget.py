"""When training ends, and how far it is."""

import math
from dataclasses import dataclass

from lra.errors import UserError
from lra.protocol import TrainerConfig
from lra.words import count


@dataclass(frozen=True)
class Spent:
    """What training has used so far."""

    steps: int = 0
    tokens: int = 0
    """Real tokens."""
    seconds: float = 0.0
    """Data and optimiser steps."""


class Budget:
    """Steps, epochs, tokens or seconds, whichever the protocol names, and its time limit."""

    def __init__(self, config: TrainerConfig, train_rows: int) -> None:
        """``train_rows``: rows of the training split. ``UserError`` if ``config`` does not fit so many."""
        if config.batch_size > train_rows:
            raise UserError(
                f"trainer.batch_size={config.batch_size} is more than the rows to train on, {train_rows}: a batch "
                f"would hold a row more than once; give trainer.batch_size={train_rows} or less, or more rows"
            )
        self._config = config
        self.steps: int | None = config.steps
        """Optimiser steps in all, ``None`` where tokens or seconds decide."""
        if config.epochs:
            self.steps = math.ceil(config.epochs * train_rows / config.batch_size)
            if config.warmup >= self.steps:
                raise UserError(
                    f"trainer.epochs={config.epochs} of {count(train_rows, 'row')} make {count(self.steps, 'step')}, "
                    f"not more than trainer.warmup={config.warmup}: training would never leave its warm-up; lower "
                    f"trainer.warmup"
                )
        elif config.tokens or config.seconds:
            self.steps = None

    def decay(self, step: int, spent: Spent) -> float:
        """Share of the decay of the learning rate that lies behind update ``step`` (from 1), in [0, 1]."""
        if self.steps is not None:
            return (step - self._config.warmup) / (self.steps - self._config.warmup + 1)
        return min(1.0, self._share(spent))

    def _share(self, spent: Spent) -> float:
        if self._config.tokens:
            return spent.tokens / self._config.tokens
        return spent.seconds / self._config.seconds

    def done(self, spent: Spent) -> bool:
        """Whether the last step has been made."""
        return self._out_of_time(spent) or self._complete(spent)

    def cut_short(self, spent: Spent) -> bool:
        """Whether the time limit, and not the budget, ended the training."""
        return self._out_of_time(spent) and not self._complete(spent)

    def _complete(self, spent: Spent) -> bool:
        return spent.steps >= self.steps if self.steps is not None else self._share(spent) >= 1

    def _out_of_time(self, spent: Spent) -> bool:
        return bool(self._config.time_limit) and spent.seconds >= self._config.time_limit
