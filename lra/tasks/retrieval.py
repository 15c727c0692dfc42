"""Retrieval: does one paper of the ACL Anthology Network cite the other? Two documents a row."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lra.data import release
from lra.data.arrays import Layout, Split, Writer
from lra.data.subset import choose
from lra.tasks import retrieval_source
from lra.tasks.base import TaskConfig
from lra.tasks.prepared import Disproved, PreparedTask, Progress
from lra.tasks.retrieval_source import Pair, Source
from lra.tasks.text_tokens import Bytes, Characters, Tokens, characters_of

NATIVE_LENGTH = 4000
LONGEST = 65_536
PUBLISHED_ROWS = {"train": 147_086, "validation": 18_090, "test": 17_437}
ORIGINAL_BYTES = 10_000
"""The original cuts each document here before it cuts to its length."""
S4_VOCAB_SIZE = 98
FOLDER = "tsv_data"
BLOCK_ROWS = 256


@dataclass
class Config(TaskConfig):
    """Which pairs, and how much of each document."""

    name: str = "retrieval"
    length: int = NATIVE_LENGTH
    """Of each document: its first bytes (``fidelity=lra``), or first characters and EOS (``s4``)."""


class Retrieval(PreparedTask):
    """See ``lra.tasks.base.Task``."""

    Config = Config
    NAME = "retrieval"
    VERSION = "1"
    CITATION = "Radev et al., LRE 47 (2013) 919-944; Tay et al., ICLR 2021 (arXiv 2011.04006)"
    NUM_CLASSES = 2
    KINDS = ("release",)
    TRUNCATES = True

    @classmethod
    def default_source(cls, config: Config, data_dir: Path) -> str:
        """There is no other place."""
        return "release"

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise ``UserError`` naming the key if ``config`` cannot be met."""
        super().check(config)
        cls.check_ranges(config, length=(1 if config.fidelity == "lra" else 2, LONGEST))

    @classmethod
    def layout(cls, config: Config) -> Layout:
        """Pairs; ids reach 256."""
        return Layout(documents=2, token_dtype="<u2")

    @classmethod
    def vocab_size(cls, config: Config, details: dict[str, Any]) -> int:
        """Bytes and padding, or the characters of the training split and three specials."""
        return Bytes.VOCAB_SIZE if config.fidelity == "lra" else _tokens(config, details).vocab_size

    @classmethod
    def fetch(cls, config: Config, data_dir: Path) -> None:
        """Unpack the release's archive if that is the source."""
        release.folder(config.source, FOLDER, data_dir)

    @classmethod
    def source_files(cls, config: Config, data_dir: Path) -> dict[str, Path]:
        """LRA's three files, and the papers if they hold ids only."""
        source = _source(config, data_dir)
        files = {path.name: path for path in source.files.values()}
        return files | (retrieval_source.papers_of(source.papers) if source.papers else {})

    @classmethod
    def build(cls, config: Config, data_dir: Path, writer: Writer, progress: Progress) -> None:
        """Read LRA's files; one block of rows is in memory at a time."""
        source = _source(config, data_dir)
        counts = {split: retrieval_source.count_rows(path) for split, path in source.files.items()}
        chosen = {split: choose(there, *_asked(config, split)) for split, there in counts.items()}
        writer.details.update(_details(config, source, counts))
        if config.fidelity == "s4":
            pairs = retrieval_source.read(source.files["train"], source.papers)
            texts = (text for pair in pairs for text in pair.documents)
            writer.details["characters"] = characters_of(texts, config.length)
            writer.details["exact"] += (
                f"; {Characters(config.length, writer.details['characters']).vocab_size} ids, S4 has {S4_VOCAB_SIZE}"
            )
        tokens = _tokens(config, writer.details)
        empty = writer.details["empty_documents"]
        done, total = 0, sum(map(len, chosen.values()))
        for split, path in source.files.items():
            for labels, texts in _blocks(_read(path, source.papers, chosen[split]), tokens):
                writer.append(split, *tokens.encode(texts), labels)
                empty[split] += texts.count(b"")
                done += len(labels)
                progress(done, total)

    @classmethod
    def prove(cls, config: Config, name: str, split: Split, details: dict[str, Any]) -> str:
        """Turn tokens back into text and compare it and the label with the source, as far as that is still there."""
        tokens = _tokens(config, details)
        path = Path(details["files"][name])
        papers = details["papers"] and Path(details["papers"])
        documents = _documents(split, name, tokens)
        if not path.is_file() or papers and not papers.is_dir():
            rows = sum(1 for _ in documents)
            return f"tokens of {rows} rows are text; {path} is gone, so that labels are only counted"
        chosen = choose(retrieval_source.count_rows(path), *_asked(config, name))
        if len(chosen) != len(split):
            raise Disproved(f"{len(chosen)} rows of {path} in {name}", len(split))
        for i, (pair, texts) in enumerate(zip(_read(path, papers, chosen), documents, strict=True)):
            if pair.label != split.labels[i]:
                raise Disproved(f"row {i} of {name} to have label {pair.label} of {path}:{pair.line}", split.labels[i])
            if texts != tuple(tokens.wanted(text) for text in pair.documents):
                raise Disproved(f"row {i} of {name} to hold the texts of {path}:{pair.line}", "other tokens")
        return f"{len(split)} labels and pairs of texts equal those of {path}"


def _source(config: Config, data_dir: Path) -> Source:
    folder = release.folder(config.source, FOLDER, data_dir, unpack=False)
    return retrieval_source.open_source(folder, Path(data_dir))


def _asked(config: Config, split: str) -> tuple[int, str]:
    """Rows asked for, and the option that says so."""
    return getattr(config, f"{split}_rows"), f"task.{split}_rows"


def _tokens(config: Config, details: dict[str, Any]) -> Tokens:
    return Bytes(config.length) if config.fidelity == "lra" else Characters(config.length, details["characters"])


def _details(config: Config, source: Source, counts: dict[str, int]) -> dict[str, Any]:
    """What the manifest says of the source."""
    folder = source.files["train"].parent
    published, found = (" / ".join(f"{rows:,}" for rows in c.values()) for c in (PUBLISHED_ROWS, counts))
    exact = f"row counts are the published {published}"
    if counts != PUBLISHED_ROWS:
        exact = f"not the published data: {found} rows instead of {published}"
    if source.papers:
        exact += "; texts are joined from papers, with line ends and tabs as spaces"
    if config.fidelity == "lra" and config.length > ORIGINAL_BYTES:
        exact += f"; the original keeps no more than {ORIGINAL_BYTES:,} bytes of a document"
    return {
        "source": f"LRA's pairs in {folder}",
        "exact": exact,
        "files": {split: str(path) for split, path in source.files.items()},
        "papers": source.papers and str(source.papers),
        "empty_documents": dict.fromkeys(counts, 0),
    }


def _read(path: Path, papers: Path | None, chosen: np.ndarray) -> Iterator[Pair]:
    """The rows whose numbers, from 0 and sorted, are ``chosen``; the others are checked, too."""
    wanted = iter(chosen.tolist())
    following = next(wanted, None)
    for i, pair in enumerate(retrieval_source.read(path, papers)):
        if i == following:
            yield pair
            following = next(wanted, None)


def _blocks(pairs: Iterator[Pair], tokens: Tokens) -> Iterator[tuple[np.ndarray, list[bytes]]]:
    """Labels (R,) and clipped documents, 2 R, of R rows at a time."""
    # clipped as they come: whole papers are many times longer
    clipped = ((pair.label, [tokens.clip(text) for text in pair.documents]) for pair in pairs)
    while block := list(islice(clipped, BLOCK_ROWS)):
        yield np.array([label for label, _ in block]), [text for _, texts in block for text in texts]


def _documents(split: Split, name: str, tokens: Tokens) -> Iterator[tuple[bytes, ...]]:
    """The texts that the tokens of each row hold."""
    for i in range(len(split)):
        first = split.sequence_lengths[split.documents * i]
        texts = tuple(tokens.decode(part) for part in np.split(split.flat(i, i + 1), [first]))
        if None in texts:
            raise Disproved(f"tokens of a text in row {i} of {name}", "ids that no text has")
        yield texts
