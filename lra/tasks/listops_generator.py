"""Random ListOps rows with the distribution of Long Range Arena, vectorised over trees.

A node at depth d (root: 1) is an operator with probability 1/4 while d < max_depth, else a digit; operators,
digits and the number of arguments are uniform. A tree is kept if its token count, brackets and digits, lies
strictly between ``length / 4`` and ``length``. Trees come in chunks with a seed each, so that the rows of a
chunk do not depend on what was generated before.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lra.tasks.listops_expressions import CLOSE, MAX, MED, MIN, SM, ZERO

OPERATOR_PROBABILITY = 0.25
CHUNK_TOKENS = 2_000_000
"""Trees in a chunk times their longest length; bounds the memory and keeps the arrays of a level in cache."""


@dataclass(frozen=True)
class Grammar:
    """What rows look like; see the module docstring."""

    length: int
    max_depth: int
    max_args: int


class Rows(NamedTuple):
    """R rows: ``tokens`` uint8 (sum of lengths,), ``lengths`` int64 (R,), ``labels`` int64 (R,)."""

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def cut(self, count: int) -> tuple["Rows", "Rows"]:
        """The first ``count`` rows and the rest."""
        end = self.lengths[:count].sum()
        head = Rows(self.tokens[:end], self.lengths[:count], self.labels[:count])
        return head, Rows(self.tokens[end:], self.lengths[count:], self.labels[count:])

    def only(self, kept: np.ndarray) -> "Rows":
        """The rows for which ``kept`` (R,) bool is True."""
        return Rows(self.tokens[np.repeat(kept, self.lengths)], self.lengths[kept], self.labels[kept])


def chunk(grammar: Grammar, seed: int, index: int) -> Rows:
    """The rows of chunk ``index``: those of a fixed number of sampled trees that have an allowed length."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
    arities = _sample_shapes(rng, grammar, max(16, CHUNK_TOKENS // grammar.length))
    operators = [rng.integers(MIN, SM + 1, len(arity), dtype=np.uint8) for arity in arities]
    digits = [rng.integers(0, 10, len(arity), dtype=np.uint8) for arity in arities]
    sizes, values = _measure_and_evaluate(arities, operators, digits)
    tokens = _lay_out(arities, sizes, operators, digits)
    return Rows(tokens, sizes[0].astype(np.int64), values[0].astype(np.int64))


def _sample_shapes(rng: np.random.Generator, grammar: Grammar, trees: int) -> list[np.ndarray]:
    """Number of arguments (0: digit) of the nodes of every level, for the trees of allowed length.

    Within a level nodes follow the order of their parents, so the children of an operator are contiguous.
    """
    levels = []
    tokens = np.ones(trees, np.int64)
    tree = np.arange(trees, dtype=np.int32)
    # a root that is a digit is always too short, so only operators are drawn for it
    is_operator = np.ones(trees, bool)
    for depth in range(1, grammar.max_depth + 1):
        arity = np.zeros(len(tree), np.int32)
        if depth > 1:
            is_operator = rng.random(len(tree), np.float32) < OPERATOR_PROBABILITY
        if depth < grammar.max_depth:
            operators = np.flatnonzero(is_operator)
            arity[operators] = rng.integers(2, grammar.max_args + 1, len(operators), dtype=np.int32)
            # an operator turns the one token of a digit into two brackets and its arguments
            tokens += np.bincount(tree[operators], arity[operators] + 1, trees).astype(np.int64)
        levels.append((tree, arity))
        # trees only grow: dropping those already too long changes nothing but the time
        growing = np.flatnonzero((arity > 0) & (tokens < grammar.length)[tree])
        tree = np.repeat(tree[growing], arity[growing])
    kept = (tokens * 4 > grammar.length) & (tokens < grammar.length)
    return [arity[kept[tree]] for tree, arity in levels]


def _measure_and_evaluate(
    arities: list[np.ndarray], operators: list[np.ndarray], digits: list[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token count and value of the subtree of every node, from the deepest level up."""
    sizes: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for arity, operator, digit in zip(reversed(arities), reversed(operators), reversed(digits)):
        size, value = np.ones(len(arity), np.int32), digit.copy()
        inner = np.flatnonzero(arity)
        if len(inner):
            first = np.cumsum(arity[inner]) - arity[inner]
            size[inner] = 2 + np.add.reduceat(sizes[-1], first)
            value[inner] = _apply(operator[inner], values[-1], first, arity[inner])
        sizes.append(size)
        values.append(value)
    return sizes[::-1], values[::-1]


def _apply(operator: np.ndarray, values: np.ndarray, first: np.ndarray, arity: np.ndarray) -> np.ndarray:
    """Value of operators whose ``arity`` arguments start at ``values[first]``."""
    result = np.empty(len(operator), np.uint8)
    # a sum of at most MAX_ARGS digits fits uint8
    for kind, reduce in ((MIN, np.minimum.reduceat), (MAX, np.maximum.reduceat), (SM, np.add.reduceat)):
        chosen = operator == kind
        result[chosen] = reduce(values, first, dtype=np.uint8)[chosen]
    result[operator == SM] %= 10
    median = operator == MED
    arguments = values[np.repeat(median, arity)]
    arity = arity[median]
    group = np.repeat(np.arange(len(arity)), arity)
    counts = np.bincount(group * 10 + arguments, minlength=10 * len(arity)).reshape(-1, 10)
    # arguments up to and including each digit: the one of rank r exceeds all digits where that is <= r
    up_to = np.cumsum(counts.astype(np.uint8), axis=1, dtype=np.uint8)
    middle = [(up_to <= rank[:, None]).sum(axis=1) for rank in ((arity - 1) // 2, arity // 2)]
    result[median] = (middle[0] + middle[1]) // 2
    return result


def _lay_out(
    arities: list[np.ndarray], sizes: list[np.ndarray], operators: list[np.ndarray], digits: list[np.ndarray]
) -> np.ndarray:
    """Write all nodes in prefix order, tree after tree: uint8 (sum of the root sizes,)."""
    tokens = np.empty(sizes[0].sum(), np.uint8)
    start = np.cumsum(sizes[0]) - sizes[0]
    for level, (arity, size, operator, digit) in enumerate(zip(arities, sizes, operators, digits)):
        inner = np.flatnonzero(arity)
        symbol = digit + np.uint8(ZERO)
        symbol[inner] = operator[inner]
        tokens[start] = symbol
        tokens[start[inner] + size[inner] - 1] = CLOSE
        if not len(inner):
            break
        children = sizes[level + 1]
        before = np.cumsum(children) - children
        first = np.cumsum(arity[inner]) - arity[inner]
        start = before + np.repeat(start[inner] + 1 - before[first], arity[inner])
    return tokens
