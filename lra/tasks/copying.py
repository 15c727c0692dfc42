"""Copying: write down a random string after a delay, symbol by symbol.

The string fills the first S positions, blanks follow, and the last S positions are equal slots: slot i asks for
symbol i, so nothing but its position tells which. The copying memory problem (Hochreiter and Schmidhuber, Neural
Computation 1997; Arjovsky et al., ICML 2016, arXiv 1511.06464, section 4.1) with one label a slot.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lra.errors import UserError
from lra.tasks.diagnostics import BLANK, FIRST_SYMBOL, SLOT, DiagnosticConfig, DiagnosticTask


@dataclass
class Config(DiagnosticConfig):
    """Which strings; a longer ``length`` is a longer delay, unless ``string_length`` grows with it."""

    name: str = "copying"
    string_length: int = 0
    """Symbols to copy; 0 takes a quarter of the row, at most 64."""


class Copying(DiagnosticTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "copying"
    CITATION = "Arjovsky, Shah and Bengio, ICML 2016 (arXiv 1511.06464), section 4.1"

    @classmethod
    def slots(cls, config: Config) -> int:
        """One for each symbol of the string."""
        return config.string_length or default_string_length(config.length)

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        usual = default_string_length(config.length)
        if config.string_length and not 1 <= config.string_length <= config.length // 2:
            raise UserError(
                f"task.string_length={config.string_length}: string and slots fill twice as many of task.length="
                f"{config.length} tokens; choose 1..{config.length // 2}, or 0 for {usual}"
            )

    @classmethod
    def parameters(cls, config: Config) -> dict[str, int | float | str]:
        """The default string length and 0 name the same rows."""
        size = cls.slots(config)
        return {
            **super().parameters(config),
            "string_length": 0 if size == default_string_length(config.length) else size,
        }

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """Padding, blank, slot and the symbols."""
        return FIRST_SYMBOL + config.alphabet

    @classmethod
    def chunk(cls, config: Config, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Uniform symbols."""
        size = cls.slots(config)
        labels = rng.integers(0, config.alphabet, (rows, size))
        tokens = np.full((rows, config.length), BLANK, cls.layout(config).token_dtype)
        tokens[:, :size] = labels + FIRST_SYMBOL
        tokens[:, -size:] = SLOT
        return tokens, labels

    @classmethod
    def answers(cls, config: Config, tokens: np.ndarray) -> np.ndarray:
        """The i-th of the tokens that are symbols, wherever they are, is the answer of slot i."""
        size = cls.slots(config)
        is_symbol = tokens >= FIRST_SYMBOL
        laid_out = (is_symbol.sum(1) == size) & (tokens[:, size:-size] == BLANK).all(1)
        laid_out &= (tokens[:, -size:] == SLOT).all(1)
        found = np.full((len(tokens), size), -1)
        found[laid_out] = tokens[laid_out][is_symbol[laid_out]].reshape(-1, size).astype(np.int64) - FIRST_SYMBOL
        return found


def default_string_length(length: int) -> int:
    """A quarter of the row, at most 64: beyond, only the delay grows."""
    return min(length // 4, 64)
