"""Recall: look up what the row said, by key or by absolute position.

``key``: P pairs of a key and a value, a token each, blanks, then M of the keys in random order; the label of each is
its value. Keys occur once in a row, so there is one answer. ``adjacent``: the same with key and value in two tokens
side by side, the layout of multi-query associative recall (Arora et al., "Zoology", arXiv 2312.04927, section 3).
There a mixer must first join two tokens, which a token shift or a convolution does for nothing and which attention
needs a layer and long training for; ``key`` asks for the memory alone. ``position``: P values at the first P
positions, blanks, then M addresses; the label of address p is the value at position p, and nothing else tells it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lra.errors import UserError
from lra.tasks.diagnostics import BLANK, FIRST_SYMBOL, DiagnosticConfig, DiagnosticTask

MODES = ("key", "adjacent", "position")
MOST_IDS = 65_536
PERMUTED = 1_000_000
"""Random numbers drawn at a time for permutations; bounds the memory."""


@dataclass
class Config(DiagnosticConfig):
    """Which memories; a longer ``length`` is a longer delay, unless ``pairs`` grows with it."""

    name: str = "recall"
    mode: str = "key"
    """``key``, ``adjacent`` or ``position``: how a value is asked for, see the module."""
    pairs: int = 0
    """Values in memory; 0 takes an eighth of the length, at most 32, or with ``position`` a quarter, at most 64."""
    keys: int = 0
    """Different keys; 0 takes twice as many as there are pairs. None with ``position``."""
    queries: int = 0
    """Values asked for, each at most once; 0 asks for all."""


@dataclass(frozen=True)
class Load:
    """What a row holds, with defaults put in."""

    pairs: int
    keys: int
    """Different keys, or addresses."""
    queries: int
    memory: int
    """Tokens of the pairs."""
    first_key: int
    """Id of the first key or address; ids of pairs or values are below."""


def load_of(config: Config) -> Load:
    """The load of ``config``; defaults by its length."""
    by_position = config.mode == "position"
    pairs = config.pairs or (min(config.length // 4, 64) if by_position else min(config.length // 8, 32))
    keys = pairs if by_position else config.keys or 2 * pairs
    symbols = config.alphabet * (keys if config.mode == "key" else 1)
    memory = 2 * pairs if config.mode == "adjacent" else pairs
    return Load(pairs, keys, config.queries or pairs, memory, FIRST_SYMBOL + symbols)


class Recall(DiagnosticTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "recall"
    CITATION = "after Arora et al., 2023 (arXiv 2312.04927), multi-query associative recall"

    @classmethod
    def slots(cls, config: Config) -> int:
        """One for each query."""
        return load_of(config).queries

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        if config.mode not in MODES:
            raise UserError(f"task.mode={config.mode!r}: {cls.NAME} takes {' | '.join(MODES)}")
        if config.mode == "position" and config.keys:
            raise UserError(f"task.keys={config.keys}: task.mode=position has none; leave it out")
        cls.check_ranges(config, pairs=(0, config.length), keys=(0, MOST_IDS))
        load = load_of(config)
        cls.check_ranges(config, queries=(0, load.pairs))
        if load.keys < load.pairs:
            raise UserError(f"task.keys={load.keys}: every pair of a row has its own key; give {load.pairs} or more")
        if (size := load.memory + load.queries) > config.length:
            raise UserError(
                f"task.pairs={load.pairs}, task.queries={load.queries}: they fill {size} tokens, task.length="
                f"{config.length} has fewer; lower them or raise the length"
            )
        if (ids := cls.vocab_size(config, {})) > MOST_IDS:
            raise UserError(
                f"task.keys={load.keys}, task.alphabet={config.alphabet}: they make {ids} token ids, {cls.NAME} takes "
                f"{MOST_IDS}; lower one"
            )

    @classmethod
    def parameters(cls, config: Config) -> dict[str, int | float | str]:
        """Defaults and the numbers that they stand for name the same rows."""
        load = load_of(config)
        usual = {
            "pairs": load_of(replace(config, pairs=0)).pairs,
            "keys": load_of(replace(config, keys=0)).keys,
            "queries": load.pairs,
        }
        given = {name: 0 if getattr(load, name) == value else getattr(load, name) for name, value in usual.items()}
        return {**super().parameters(config), **given}

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """Padding, blank, one unused, then values or pairs, then keys or addresses."""
        load = load_of(config)
        return load.first_key + load.keys

    @classmethod
    def chunk(cls, config: Config, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Uniform values; distinct keys in uniform order; queries without repetition, in uniform order."""
        load = load_of(config)
        values = rng.integers(0, config.alphabet, (rows, load.pairs))
        if config.mode == "position":
            keys = np.broadcast_to(np.arange(load.pairs), values.shape)
        else:
            keys = _choices(rng, rows, load.keys, load.pairs)
        tokens = np.full((rows, config.length), BLANK, cls.layout(config).token_dtype)
        memory = tokens[:, : load.memory]
        if config.mode == "adjacent":
            memory[:, ::2], memory[:, 1::2] = keys + load.first_key, values + FIRST_SYMBOL
        else:
            memory[:] = FIRST_SYMBOL + values + (keys * config.alphabet if config.mode == "key" else 0)
        asked = _choices(rng, rows, load.pairs, load.queries)
        tokens[:, -load.queries :] = np.take_along_axis(keys, asked, axis=1) + load.first_key
        return tokens, np.take_along_axis(values, asked, axis=1)

    @classmethod
    def answers(cls, config: Config, tokens: np.ndarray) -> np.ndarray:
        """Write what the row says into a table by key, then look the queries up."""
        load = load_of(config)
        tokens = tokens.astype(np.int64)
        memory, queries = tokens[:, : load.memory], tokens[:, -load.queries :] - load.first_key
        if config.mode == "adjacent":
            keys, values = memory[:, ::2] - load.first_key, memory[:, 1::2] - FIRST_SYMBOL
        elif config.mode == "key":
            keys, values = np.divmod(memory - FIRST_SYMBOL, config.alphabet)
        else:
            keys, values = np.broadcast_to(np.arange(load.pairs), memory.shape), memory - FIRST_SYMBOL
        # one column more takes what is no key
        table = np.full((len(tokens), load.keys + 1), -1)
        known = (keys >= 0) & (keys < load.keys) & (values >= 0) & (values < config.alphabet)
        np.put_along_axis(table, np.where(known, keys, load.keys), values, axis=1)
        table[:, -1] = -1
        laid_out = (tokens[:, load.memory : -load.queries] == BLANK).all(1) & known.all(1)
        laid_out &= (table >= 0).sum(1) == load.pairs
        asked = np.where((queries >= 0) & (queries < load.keys), queries, load.keys)
        return np.where(laid_out[:, None], np.take_along_axis(table, asked, axis=1), -1)


def _choices(rng: np.random.Generator, rows: int, of: int, count: int) -> np.ndarray:
    """``count`` different ones of 0 ... ``of`` - 1 in uniform order for each row, (R, count)."""
    step = max(1, PERMUTED // of)
    parts = [
        rng.permuted(np.broadcast_to(np.arange(of), (min(step, rows - start), of)), axis=1)[:, :count]
        for start in range(0, rows, step)
    ]
    return np.concatenate(parts)
