"""Ids of texts: bytes as in Long Range Arena, characters as in S4.

Shapes: R texts; ids of several texts lie end to end, (sum of lengths,), beside the number of ids of each, (R,).
"""

import re

import numpy as np

BYTE_VOCAB = 257
"""256 bytes and padding (id 0)."""
PAD, UNKNOWN, EOS = 0, 1, 2
"""Marks of the character vocabulary, which its characters follow."""
MIN_COUNT = 15
"""A character that occurs less often is unknown (S4, configs/dataset/imdb.yaml)."""
CODE_POINTS = 0x110000
BLOCK_TEXTS = 1000
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def from_bytes(texts: list[bytes], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte + 1 of the first ``length`` bytes of each text."""
    cut = [text[:length] for text in texts]
    return np.frombuffer(b"".join(cut), np.uint8).astype(np.uint16) + 1, np.array([len(text) for text in cut])


def to_bytes(ids: np.ndarray) -> bytes:
    """The text of one row of byte ids."""
    return (ids - 1).astype(np.uint8).tobytes()


class Characters:
    """Ids of characters: three marks, then the ``known`` characters in their order."""

    def __init__(self, known: str) -> None:
        self.known = known
        self.vocab_size = len(known) + 3
        self._others = re.compile(f"[^{re.escape(known)}]" if known else ".", re.DOTALL)
        self._points = np.concatenate([_code_points(REPLACEMENT).repeat(3), _code_points(known)])
        self._ids = np.full(CODE_POINTS, UNKNOWN, np.uint16)
        self._ids[_code_points(known)] = np.arange(3, self.vocab_size)

    @classmethod
    def found_in(cls, texts: list[bytes], length: int) -> "Characters":
        """Those that occur ``MIN_COUNT`` times in the first ``length`` characters of ``texts`` (UTF-8).

        The more frequent come first, equally frequent ones by code point, as in torchtext's vocabularies.
        """
        counts = np.zeros(CODE_POINTS, np.int64)
        for start in range(0, len(texts), BLOCK_TEXTS):
            block = "".join(text.decode()[:length] for text in texts[start : start + BLOCK_TEXTS])
            counts += np.bincount(_code_points(block), minlength=CODE_POINTS)
        frequent = np.flatnonzero(counts >= MIN_COUNT)
        return cls("".join(map(chr, frequent[np.argsort(-counts[frequent], kind="stable")])))

    def encode(self, texts: list[bytes], length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first ``length - 1`` characters of each text (UTF-8), then ``EOS``."""
        cut = [text.decode()[: length - 1] for text in texts]
        lengths = np.array([len(text) + 1 for text in cut])
        ids = np.full(lengths.sum(), EOS, np.uint16)
        inside = np.ones(len(ids), bool)
        inside[np.cumsum(lengths) - 1] = False
        ids[inside] = self._ids[_code_points("".join(cut))]
        return ids, lengths

    def decode(self, ids: np.ndarray) -> str:
        """The text of one row without its end mark; unknown characters are U+FFFD."""
        return self._points[ids[:-1]].tobytes().decode("utf-32-le")

    def known_part(self, text: str) -> str:
        """``text`` with U+FFFD for every character that is not known."""
        return self._others.sub(REPLACEMENT, text)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
