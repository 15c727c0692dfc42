"""What the diagnostic tasks have in common: seeded rows of one length, answered at the slots at their ends.

A row is a memory, blanks, then M slots; the label of a slot is found in the memory and nowhere else. Every slot
sees the whole memory before it, so that causal mixers have what bidirectional ones have.

Shapes: R rows, L tokens a row, M slots a row.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import arrays
from lra.data.arrays import Layout, Split, Writer
from lra.errors import UserError
from lra.tasks.base import TaskConfig
from lra.tasks.prepared import Disproved, PreparedTask, Progress, blocks

BLANK, SLOT, FIRST_SYMBOL = 1, 2, 3
"""Token ids; 0 is padding, symbols come from ``FIRST_SYMBOL`` on."""
MOST_SYMBOLS = 256
SHORTEST, LONGEST = 8, 65_536
CHUNK_TOKENS = 250_000
MOST_FRUITLESS_CHUNKS = 20


@dataclass
class DiagnosticConfig(TaskConfig):
    """Options of every diagnostic."""

    length: int = 256
    """Tokens of every row."""
    seed: int = 0
    """Of the data; the seed of training is another."""
    train_rows: int = 20_000
    validation_rows: int = 500
    test_rows: int = 1_000
    alphabet: int = 16
    """Different symbols to remember, and classes."""


class DiagnosticTask(PreparedTask):
    """A task of rows that ``chunk`` makes and ``answers`` reads again."""

    VERSION = "1"
    FIDELITIES = ("lra",)
    KINDS = ("generated",)

    # What a diagnostic fills in.

    @classmethod
    @abstractmethod
    def chunk(cls, config: DiagnosticConfig, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens (R, L) and labels (R, M)."""

    @classmethod
    @abstractmethod
    def answers(cls, config: DiagnosticConfig, tokens: np.ndarray) -> np.ndarray:
        """Labels (R, M) found by reading ``tokens`` (R, L); -1 where a row is not laid out as it must be."""

    @classmethod
    @abstractmethod
    def slots(cls, config: DiagnosticConfig) -> int:
        """M, with defaults put in."""

    # What is the same for all.

    @classmethod
    def default_source(cls, config: DiagnosticConfig, data_dir: Path) -> str:
        """There is no other."""
        return "generated"

    @classmethod
    def check(cls, config: DiagnosticConfig) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        if config.source not in ("auto", *cls.KINDS):
            raise UserError(f"task.source={config.source}: rows of {cls.NAME} are generated; leave it out")
        cls.check_ranges(
            config,
            length=(SHORTEST, LONGEST),
            seed=(0, 2**63 - 1),
            train_rows=(1, 10**9),
            validation_rows=(1, 10**9),
            test_rows=(1, 10**9),
            alphabet=(2, MOST_SYMBOLS),
        )

    @classmethod
    def layout(cls, config: DiagnosticConfig) -> Layout:
        """A label for every slot."""
        dtype = "|u1" if cls.vocab_size(config, {}) <= 256 else "<u2"
        return Layout(outputs=cls.slots(config), token_dtype=dtype)

    @classmethod
    def num_classes(cls, config: DiagnosticConfig) -> int:
        """The symbols."""
        return config.alphabet

    @classmethod
    def build(cls, config: DiagnosticConfig, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Generate the rows of every split, evaluation first: they stay when the number of training rows changes."""
        writer.details["source"] = f"generated with seed {config.seed}"
        writer.details["exact"] = "a diagnostic of this harness: there are no other rows"
        counts = {"test": config.test_rows, "validation": config.validation_rows, "train": config.train_rows}
        done, total = 0, sum(counts.values())
        stream = cls._distinct(config, total)
        tokens, labels = next(stream)
        for split, count in counts.items():
            while count:
                if not len(labels):
                    tokens, labels = next(stream)
                head, tokens = tokens[:count], tokens[count:]
                answers, labels = labels[:count], labels[count:]
                writer.append(split, head.ravel(), np.full(len(head), config.length), answers)
                count -= len(head)
                done += len(head)
                progress(done, total)

    @classmethod
    def _distinct(cls, config: DiagnosticConfig, wanted: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Chunks of rows without those that came before; a chunk depends on the seed and its number only."""
        size = max(16, CHUNK_TOKENS // config.length)
        lengths = np.full(size, config.length)
        seen: set[bytes] = set()
        index = fruitless = 0
        while fruitless < MOST_FRUITLESS_CHUNKS:
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(config.seed, spawn_key=(index,))))
            tokens, labels = cls.chunk(config, rng, size)
            index += 1
            new = np.zeros(size, bool)
            for i, key in enumerate(arrays.row_hashes(tokens, lengths)):
                new[i] = key not in seen
                seen.add(key)
            fruitless = 0 if new.any() else fruitless + 1
            if new.any():
                yield tokens[new], labels[new]
        raise UserError(
            f"task={cls.NAME} with {config.alphabet} symbols in {config.length} tokens: expected {wanted} distinct "
            f"rows, found no more than {len(seen)}; ask for fewer rows, or raise task.alphabet or the load"
        )

    @classmethod
    def prove(cls, config: DiagnosticConfig, name: str, split: Split, details: dict[str, Any]) -> str:
        """Find every answer by reading the row."""
        if (split.lengths != config.length).any():
            raise Disproved(f"{config.length} tokens in every row of {name}", split.lengths.min())
        row = 0
        for tokens, lengths, labels in blocks(split, config.length):
            found = cls.answers(config, tokens.reshape(len(lengths), config.length))
            if (wrong := np.argwhere(found != labels)).size:
                i, slot = wrong[0]
                expected = f"slot {slot} of row {row + i} of {name} to have answer {labels[i, slot]}"
                raise Disproved(expected, found[i, slot] if found[i, slot] >= 0 else "a row of another layout")
            row += len(labels)
        return f"{labels.shape[1]} answers a row found by reading it and equal"
