"""Text: the sentiment of an IMDb review, read byte by byte (LRA) or character by character (S4).

Rows lie in the order of their ids (``lra.data.splits``), so the same arrays come out of every copy of the reviews.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import splits as published
from lra.data.arrays import SPLITS, Layout, Split, Writer
from lra.data.subset import choose
from lra.errors import UserError
from lra.tasks import text_source
from lra.tasks.base import TaskConfig
from lra.tasks.prepared import Disproved, PreparedTask, Progress
from lra.tasks.text_source import BLOCK_ROWS, Reviews
from lra.tasks.text_tokens import SPECIALS, Bytes, Characters, Tokens, first_characters

NATIVE_LENGTH = 4000
"""Of LRA's paper, section 2.2.2; the configuration released with it has 1000, S4 4096."""
SHORTEST, LONGEST = 2, 65_536
VALIDATIONS = ("train", "test")
MIN_COUNT = 15
"""A character that train has less often is unknown (S4, configs/dataset/imdb.yaml)."""


@dataclass
class Config(TaskConfig):
    """Which reviews, cut where."""

    name: str = "text"
    length: int = NATIVE_LENGTH
    """Tokens of a review that are kept, from its start; the end mark of ``s4`` is one of them."""
    validation: str = "train"
    """Where validation rows are from: ``train``, the published tenth of it, or ``test``, as LRA selects."""


class Text(PreparedTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "text"
    VERSION = "1"
    CITATION = "Maas et al., ACL 2011 (P11-1015); Tay et al., ICLR 2021 (arXiv 2011.04006)"
    NUM_CLASSES = 2
    KINDS = ("hub",)
    TRUNCATES = True

    @classmethod
    def default_source(cls, config: Config, data_dir: Path) -> str:
        """The reviews are on the Hub only; its mirror below ``data_dir`` counts as it."""
        return "hub"

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        if config.validation not in VALIDATIONS:
            raise UserError(f"task.validation={config.validation!r}: text takes {' | '.join(VALIDATIONS)}")
        cls.check_ranges(config, length=(SHORTEST, LONGEST))

    @classmethod
    def layout(cls, config: Config) -> Layout:
        """Bytes of UTF-8 are below 248; how many characters there are is not known before they are read."""
        return Layout(token_dtype="|u1" if config.fidelity == "lra" else "<u2")

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """All bytes and padding, or the characters found and three marks."""
        return Bytes.VOCAB_SIZE if config.fidelity == "lra" else SPECIALS + len(details["characters"])

    @classmethod
    def fetch(cls, config: Config, data_dir: Path) -> None:
        """Download the reviews if they are not on this machine."""
        text_source.fetch(config.source, data_dir)

    @classmethod
    def lacking(cls, config: Config, data_dir: Path) -> str | None:
        """A network is enough."""
        return text_source.lacking(config.source, data_dir) or super().lacking(config, data_dir)

    @classmethod
    def source_files(cls, config: Config, data_dir: Path) -> dict[str, Path]:
        """The parquet files."""
        return text_source.files(config.source, data_dir)

    @classmethod
    def build(cls, config: Config, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Write the reviews in the order of their ids."""
        reviews = {origin: text_source.read(config.source, data_dir, origin) for origin in text_source.SPLITS}
        marks = {origin: published.fingerprint(rows.digests, rows.labels) for origin, rows in reviews.items()}
        where, folder = text_source.describe(config.source, data_dir)
        exact = marks == published.fingerprints("imdb")
        writer.details |= {
            "source": where,
            "exact": "the published 25,000 + 25,000 reviews" if exact else "not the published reviews",
            "folder": str(folder.absolute()),
            "fingerprints": marks,
        }
        if config.fidelity == "s4":
            writer.details["characters"] = frequent_characters(reviews["train"].texts, config.length)
        tokens = _tokens(config, writer.details)
        chosen = {name: _rows(config, name, reviews[_origin(config, name)]) for name in SPLITS}
        done, total = 0, sum(map(len, chosen.values()))
        for name, rows in chosen.items():
            origin = reviews[_origin(config, name)]
            for start in range(0, len(rows), BLOCK_ROWS):
                block = rows[start : start + BLOCK_ROWS]
                writer.append(name, *tokens.encode([origin.texts[i] for i in block]), origin.labels[block])
                done += len(block)
                progress(done, total)

    @classmethod
    def prove(cls, config: Config, name: str, split: Split, details: dict[str, Any]) -> str:
        """Turn the tokens back into text and compare text and label with the source; count what is left without it."""
        tokens = _tokens(config, details)
        texts = [tokens.decode(split.row(i)) for i in range(len(split))]
        if None in texts:
            raise Disproved(f"row {texts.index(None)} of {name} to be ids of a text", "others")
        origin = _origin(config, name)
        folder = Path(details["folder"])
        try:
            reviews = text_source.read(str(folder), folder, origin)
        except UserError:
            _check_counts(config, name, split, details)
            return f"ids and class counts are right; labels not compared, as {folder} has no reviews now"
        if published.fingerprint(reviews.digests, reviews.labels) != details["fingerprints"][origin]:
            raise Disproved(f"the reviews in {folder} to be those that were read", "others")
        if config.fidelity == "s4" and name == "train":
            _check_characters(config, reviews, details)
        rows = _rows(config, name, reviews)
        expected = Counter(zip((tokens.wanted(reviews.texts[i]) for i in rows), reviews.labels[rows].tolist()))
        found = Counter(zip(texts, split.labels.tolist()))
        if found != expected:
            text, label = next(iter(found - expected))
            raise Disproved(f"{name} to hold the reviews of {folder}", f"another: label {label}, {text[:60]!r}")
        return f"{len(split)} texts and labels compared with {folder} and equal"

    @classmethod
    def warnings(cls, config: Config, lengths: np.ndarray, details: dict[str, Any]) -> list[str]:
        """What a reader of the number must know."""
        found = super().warnings(config, lengths, details)
        if config.validation == "test":
            found.append("validation is the test split, as in LRA: the checkpoint was chosen by the rows that score it")
        if details["fingerprints"] != published.fingerprints("imdb"):
            found.append(f"the reviews are not the published ones: {details['source']}")
        return found


def _origin(config: Config, name: str) -> str:
    """The split of the source that the rows of split ``name`` are from."""
    return config.validation if name == "validation" else name


def _rows(config: Config, name: str, reviews: Reviews) -> np.ndarray:
    """Positions in ``reviews`` of the rows of split ``name``, in the order of their ids."""
    ids = np.arange(len(reviews.labels))
    if config.validation == "train" and name != "test":
        if published.fingerprint(reviews.digests, reviews.labels) == published.fingerprints("imdb")["train"]:
            ids = published.load("imdb")[name]
        else:
            validation = published.text_validation(reviews.digests, reviews.labels)
            ids = validation if name == "validation" else np.setdiff1d(ids, validation)
    if not len(ids):
        raise UserError(f"task.source={config.source}: expected rows for {name}, found too few; name another copy")
    ids = ids[choose(len(ids), getattr(config, f"{name}_rows"), f"task.{name}_rows")]
    return published.text_order(reviews.digests, reviews.labels)[ids]


def _tokens(config: Config, details: dict[str, Any]) -> Tokens:
    """How a text becomes ids and back."""
    return Bytes(config.length) if config.fidelity == "lra" else Characters(config.length, details["characters"])


def frequent_characters(texts: list[bytes], length: int) -> str:
    """Characters that occur ``MIN_COUNT`` times among those kept of ``texts``: first ``length`` - 1 of each.

    The more frequent come first, equally frequent ones by code point, as in the vocabularies of torchtext.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(first_characters(text, length))
    return "".join(sorted((c for c in counts if counts[c] >= MIN_COUNT), key=lambda c: (-counts[c], c)))


def _check_characters(config: Config, reviews: Reviews, details: dict[str, Any]) -> None:
    """Count them by their code points."""
    counts = np.zeros(0x110000, np.int64)
    for start in range(0, len(reviews.texts), BLOCK_ROWS):
        block = "".join(text.decode()[: config.length - 1] for text in reviews.texts[start : start + BLOCK_ROWS])
        counts += np.bincount(np.frombuffer(block.encode("utf-32-le"), "<u4"), minlength=len(counts))
    known = np.flatnonzero(counts >= MIN_COUNT)
    expected = "".join(map(chr, known[np.argsort(-counts[known], kind="stable")]))
    if details["characters"] != expected:
        raise Disproved(f"the characters {expected!r}", repr(details["characters"]))


def _check_counts(config: Config, name: str, split: Split, details: dict[str, Any]) -> None:
    """As many of either class as in the published reviews, if all are there."""
    if getattr(config, f"{name}_rows") or details["fingerprints"] != published.fingerprints("imdb"):
        return
    ids = published.load("imdb") if config.validation == "train" else {}
    expected = [len(ids.get(name, range(text_source.ROWS))) // 2] * 2
    if (found := np.bincount(split.labels, minlength=2).tolist()) != expected:
        raise Disproved(f"{expected} reviews of the classes in {name}", found)
