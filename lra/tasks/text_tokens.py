"""Documents as token ids and back: bytes as in LRA, characters as in S4.

Shapes: N documents; tokens lie end to end.
"""

import re
from collections.abc import Iterable
from typing import Protocol

import numpy as np

PAD, UNKNOWN, EOS = 0, 1, 2
"""Ids of S4's vocabulary before its characters."""
SPECIALS = 3
_NO_CHARACTER = "\udfff"
"""Stands for the unknown one in text; what is decoded, broken bytes included, never holds it."""
# the first n characters of a text are within its first 4 n bytes
_MOST_BYTES = 4


class Tokens(Protocol):
    """How a document becomes ids."""

    def clip(self, text: bytes) -> bytes:
        """The part of ``text`` that ``encode`` looks at."""

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the documents end to end, and their lengths (N,), each at least 1."""

    def wanted(self, text: bytes) -> bytes:
        """What ``decode`` must give for ``text``."""

    def decode(self, tokens: np.ndarray) -> bytes | None:
        """The text that the tokens of one document hold; None if no document has such tokens."""


class Bytes:
    """Id = byte + 1 of the first ``length`` bytes. An empty document is the padding id, once."""

    VOCAB_SIZE = 257

    def __init__(self, length: int) -> None:
        self.length = length

    def clip(self, text: bytes) -> bytes:
        return text[: self.length]

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        texts = [self.clip(text) for text in texts]
        lengths = np.array([len(text) for text in texts])
        tokens = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint16) + np.uint16(1)
        if not lengths.all():
            tokens = np.insert(tokens, np.cumsum(lengths)[lengths == 0], PAD)
        return tokens, np.maximum(lengths, 1)

    def wanted(self, text: bytes) -> bytes:
        return self.clip(text)

    def decode(self, tokens: np.ndarray) -> bytes | None:
        if tokens.tolist() == [PAD]:
            return b""
        if tokens.min() < 1 or tokens.max() >= self.VOCAB_SIZE:
            return None
        return (tokens - 1).astype(np.uint8).tobytes()


class Characters:
    """Ids of the first ``length`` - 1 characters, then EOS.

    ``characters`` are those that have an id, in their order. A byte that is no UTF-8 counts as a character of its own.
    """

    def __init__(self, length: int, characters: str) -> None:
        self.length = length
        self.characters = characters
        self._table = np.full(0x110000, UNKNOWN, np.uint16)
        self._table[_codes(characters)] = np.arange(SPECIALS, SPECIALS + len(characters))
        self._codes = np.concatenate((_codes(_NO_CHARACTER * SPECIALS), _codes(characters)))
        self._unknown = re.compile(f"[^{_NO_CHARACTER}{re.escape(characters)}]")

    @property
    def vocab_size(self) -> int:
        """Specials and characters."""
        return SPECIALS + len(self.characters)

    def clip(self, text: bytes) -> bytes:
        return text[: _MOST_BYTES * (self.length - 1)]

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        cut = [first_characters(text, self.length) for text in texts]
        lengths = np.array([len(text) for text in cut])
        tokens = np.insert(self._table[_codes("".join(cut))], np.cumsum(lengths), EOS)
        return tokens, lengths + 1

    def wanted(self, text: bytes) -> bytes:
        return _encoded(self._unknown.sub(_NO_CHARACTER, first_characters(text, self.length)))

    def decode(self, tokens: np.ndarray) -> bytes | None:
        ids = tokens[:-1]
        if tokens[-1] != EOS or np.isin(ids, (PAD, EOS)).any() or tokens.max() >= self.vocab_size:
            return None
        return _encoded(self._codes[ids].tobytes().decode("utf-32-le", "surrogatepass"))


def characters_of(texts: Iterable[bytes], length: int) -> str:
    """All characters that are kept of ``texts``, in the order of their code points."""
    found: set[str] = set()
    for text in texts:
        found.update(first_characters(text, length))
    return "".join(sorted(found))


def first_characters(text: bytes, length: int) -> str:
    """The first ``length`` - 1 characters."""
    return text[: _MOST_BYTES * (length - 1)].decode("utf-8", "surrogateescape")[: length - 1]


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
