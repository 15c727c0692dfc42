"""ListOps read literally, one node after the other: what the vectorised code is tested against."""

import statistics


def value(symbols):
    """Recursive evaluation of an iterator of symbols without parentheses."""
    symbol = next(symbols)
    if not symbol.startswith("["):
        return int(symbol) if symbol.isdigit() else None
    arguments = []
    while (argument := value(symbols)) is not None:
        arguments.append(argument)
    return {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda a: int(statistics.median(a)),
        "[SM": lambda a: sum(a) % 10,
    }[symbol](arguments)


def value_of(text):
    symbols = iter(text.replace("(", "").replace(")", "").split())
    result = value(symbols)
    assert next(symbols, None) is None
    return result


def reference_tree(rng, depth=1):
    """LRA's procedure read literally: one node after the other."""
    if depth == 10 or rng.random() >= 0.25:
        return [str(rng.randrange(10))]
    arguments = [reference_tree(rng, depth + 1) for _ in range(rng.randint(2, 10))]
    return [rng.choice(["[MIN", "[MAX", "[MED", "[SM"]), *(s for a in arguments for s in a), "]"]
