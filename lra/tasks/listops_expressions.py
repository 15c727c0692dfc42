"""ListOps expressions as token ids: the vocabulary, reading and writing text, and evaluation.

An expression is a digit or ``[OP e1 ... ek ]``. ``MIN`` and ``MAX`` mean what they say, ``SM`` is the sum
modulo 10 and ``MED`` the median, for an even number of arguments the mean of the middle two, rounded down.
"""

import numpy as np

from lra.errors import UserError

SYMBOLS = ("[MIN", "[MAX", "[MED", "[SM", "]", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
"""Token id = index + 1; id 0 is padding. Never reorder: prepared data and checkpoints hold these ids."""

IDS = {symbol: index for index, symbol in enumerate(SYMBOLS, start=1)}
VOCAB_SIZE = len(SYMBOLS) + 1
EOS = VOCAB_SIZE
"""After the expression where S4's input pipeline is followed."""
S4_VOCAB_SIZE = VOCAB_SIZE + 2
"""With EOS and S4's unknown symbol, which no row has but its embedding counts."""
MIN, MAX, MED, SM, CLOSE, ZERO = (IDS[symbol] for symbol in ("[MIN", "[MAX", "[MED", "[SM", "]", "0"))
MAX_ARGS = 10
"""Most arguments an operator takes in LRA's definition."""

# parentheses only group arguments pairwise, for the parsers ListOps was made for; LRA drops them too
_TEXT_IDS = IDS | {"(": 0, ")": 0}


def tokenise(text: str) -> np.ndarray:
    """Token ids (uint8) of symbols separated by spaces, parentheses dropped; ``UserError`` on others."""
    symbols = text.split()
    try:
        ids = np.fromiter(map(_TEXT_IDS.__getitem__, symbols), np.uint8, len(symbols))
    except KeyError as error:
        raise UserError(
            f"symbol {error.args[0]!r} is unknown, expected {' '.join(SYMBOLS)} or parentheses, "
            "separated by spaces; correct the row or remove it"
        ) from None
    return ids[ids > 0]


def decode(ids: np.ndarray) -> str:
    """The text of token ids, without padding and EOS; the inverse of ``tokenise`` up to parentheses."""
    return " ".join(SYMBOLS[i - 1] for i in np.asarray(ids).tolist() if i not in (0, EOS))


def with_eos(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that lie end to end, each with EOS after it, and their lengths (R,)."""
    return np.insert(tokens, np.cumsum(lengths), EOS), lengths + 1


def without_eos(tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The inverse; None unless every row ends with EOS and has no other."""
    ends = np.cumsum(lengths) - 1
    if not np.array_equal(np.flatnonzero(tokens == EOS), ends):
        return None
    return np.delete(tokens, ends), lengths - 1


def evaluate(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Values (R,) int64 of R concatenated expressions, -1 where a row is no valid expression.

    Rewrites all innermost operators of all rows at once into their value until none is left. Shares nothing
    with the generator, which evaluates the trees it sampled and never reads tokens.
    """
    tokens = np.array(tokens, dtype=np.uint8)
    row = np.repeat(np.arange(len(lengths)), lengths)
    while True:
        brackets = np.flatnonzero((tokens <= CLOSE) & (tokens > 0))
        closing = tokens[brackets] == CLOSE
        innermost = np.flatnonzero(~closing[:-1] & closing[1:])
        first, last = brackets[innermost], brackets[innermost + 1]
        arity = last - first - 1
        # a bracket that is closed only in a later row, or has no value, stays and makes its row invalid
        valid = (row[first] == row[last]) & (arity >= 1) & (arity <= MAX_ARGS)
        first, last, arity = first[valid], last[valid], arity[valid]
        if not len(first):
            break
        tokens[first] = ZERO + _apply(tokens, first, arity)
        edges = np.zeros(len(tokens) + 1, np.int8)
        edges[first + 1] += 1
        edges[last + 1] -= 1
        kept = np.cumsum(edges[:-1], dtype=np.int8) == 0
        tokens, row = tokens[kept], row[kept]
    values = np.full(len(lengths), -1)
    single = np.bincount(row, minlength=len(lengths))[row] == 1
    done = single & (tokens >= ZERO) & (tokens < VOCAB_SIZE)
    values[row[done]] = tokens[done].astype(np.int64) - ZERO
    return values


def _apply(tokens: np.ndarray, first: np.ndarray, arity: np.ndarray) -> np.ndarray:
    """Value of each operator at ``first``, whose ``arity`` arguments are the digits right after it."""
    column = np.arange(arity.max())
    inside = column < arity[:, None]
    positions = np.minimum(first[:, None] + 1 + column, len(tokens) - 1)
    arguments = np.sort(np.where(inside, tokens[positions] - ZERO, 255).astype(np.uint8), axis=1)
    each = np.arange(len(first))
    low, high = arguments[each, (arity - 1) // 2], arguments[each, arity // 2]
    total = np.where(inside, arguments, 0).sum(axis=1)
    operator = tokens[first]
    return np.select(
        [operator == MIN, operator == MAX, operator == MED],
        [arguments[:, 0], arguments[each, arity - 1], (low + high) // 2],
        total % 10,
    ).astype(np.uint8)


def explain(ids: np.ndarray) -> str:
    """What is wrong with an expression to which ``evaluate`` gives no value."""
    # number of arguments seen by each open bracket, outermost last to close
    arguments = [0]
    for position, token in enumerate(np.asarray(ids).tolist(), start=1):
        if token < CLOSE:
            arguments.append(0)
            continue
        if token == CLOSE:
            if len(arguments) == 1:
                return f"brackets are unbalanced: ']' at token {position} closes nothing"
            if not 1 <= arguments.pop() <= MAX_ARGS:
                return f"the operator closed at token {position} has none or more than {MAX_ARGS} arguments"
        arguments[-1] += 1
    if len(arguments) > 1:
        return f"brackets are unbalanced: {len(arguments) - 1} are never closed"
    return f"expected one expression, found {arguments[0]}"
