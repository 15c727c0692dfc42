"""What somebody meant who wrote a name that does not exist: nothing is better than something misleading."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

CLOSE = 0.75
"""Least similarity of a misspelling; below lie words that merely share letters (tracker and trainer have 0.71)."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A clause with those of ``choices`` that have ``name`` as a word, or else are spelled most alike; may be empty."""
    return _clause(_near(name, list(choices)))


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """A clause for a ``key`` that is none of ``keys``: near ones of its level, the same word elsewhere, or all."""
    group, dot, name = key.rpartition(".")
    keys = list(keys)
    level = [k.removeprefix(group + dot) for k in keys if k.rpartition(".")[0] == group]
    if near := _near(name, level):
        return _clause([group + dot + k for k in near])
    elsewhere = [k for k in keys if "." in k and k.rpartition(".")[2] == name]
    if len(elsewhere) == 1:
        return _clause(elsewhere)
    return f"; {'here ' + group + ' has' if group else 'choose'} {' | '.join(level)}" if level else ""


def _near(name: str, choices: list[str]) -> list[str]:
    name = name.lower()
    if found := [choice for choice in choices if name in re.split(r"[_/-]", choice)]:
        return found
    likeness = {choice: SequenceMatcher(None, choice, name).ratio() for choice in choices}
    best = max(likeness.values(), default=0)
    return [choice for choice, value in likeness.items() if value == best >= CLOSE]


def _clause(found: list[str]) -> str:
    return f"; did you mean {' or '.join(found)}?" if found else ""
