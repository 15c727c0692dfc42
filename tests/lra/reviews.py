"""IMDb for tests: the real reviews where they are beside the checkout, and small made-up copies in every layout."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

REAL = Path(__file__).resolve().parents[3] / "shared/data/text"


def real() -> Path:
    """The folder of the real reviews in the Hub's layout; skips the test where it is not there."""
    folder = REAL / "stanfordnlp/imdb"
    if not folder.is_dir():
        pytest.skip(f"the IMDb reviews are not beside this checkout: {folder} is missing")
    return folder


def some(rows: int, start: int = 0) -> tuple[list[str], list[int]]:
    """Distinct texts of 6 to about 40 characters and their labels, half of them positive."""
    texts = [f"{i:05} " + "".join(chr(97 + (i * k) % 26) for k in range(i % 35)) for i in range(start, start + rows)]
    return texts, [i % 2 for i in range(rows)]


def write_hub(folder: Path, splits: dict[str, tuple[list[str], list[int]]]) -> Path:
    """Parquet files as the Hub has them."""
    (folder / "plain_text").mkdir(parents=True, exist_ok=True)
    for split, (texts, labels) in splits.items():
        path = folder / "plain_text" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": pyarrow.array(labels, "int64")}), path)
    return folder


def write_tree(folder: Path, splits: dict[str, tuple[list[str], list[int]]]) -> Path:
    """``aclImdb``: a file a review."""
    for split, (texts, labels) in splits.items():
        for i, (text, label) in enumerate(zip(texts, labels)):
            path = folder / "aclImdb" / split / ("neg", "pos")[label] / f"{i}_{(3, 8)[label]}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    return folder / "aclImdb"
