"""``scripts/make_splits``: write the published ids of ``lra/data/splits`` again; the same bytes come out."""

import argparse
import base64
import json
from pathlib import Path

import numpy as np

from lra.data import splits
from lra.tasks import text_source

ORDERS = {
    "imdb": "the 25,000 rows of train by the SHA-256 of their text in UTF-8; equal texts have equal labels",
    "cifar10": "the 50,000 rows of train of uoft-cs/cifar10 on the Hugging Face Hub, as its file has them",
    "pathfinder": "the 200,000 lines of metadata/<n>.npy, n ascending, of one set (any resolution, any difficulty)",
    "cifar10-s4": "the 50,000 training rows in the order of the original Python batches, which is torchvision's",
    "pathfinder-s4": "the 200,000 lines of metadata/<n>.npy, n ascending, of one set",
}
METHODS = {
    "imdb": "of each label a tenth of the rows, in the order of SHA-256('seed:imdb:' + SHA-256 of the text in hex); "
    "equal texts stay together, and are passed over where not all of them fit",
    "cifar10": "the first tenth in the order of SHA-256('seed:cifar10:id')",
    "pathfinder": "validation the first tenth, test the second in the order of SHA-256('seed:pathfinder:id')",
    "cifar10-s4": "torch.utils.data.random_split into 45,000 and 5,000, as in state-spaces/s4",
    "pathfinder-s4": "torch.utils.data.random_split into 160,000, 20,000 and 20,000, as in state-spaces/s4",
}


def imdb(rows: dict[str, tuple[list[bytes], np.ndarray]]) -> str:
    """The text of ``imdb.json`` from the SHA-256 of the texts and the labels of train and test."""
    ids = {"validation": splits.text_validation(*rows["train"])}
    return _published(
        "imdb",
        len(rows["train"][1]),
        ids,
        {
            "fingerprint": "SHA-256 of the sorted rows, each the SHA-256 of the text and the label in one byte",
            "fingerprints": {split: splits.fingerprint(*both) for split, both in rows.items()},
        },
    )


def cifar10() -> str:
    """The text of ``cifar10.json``."""
    return _published("cifar10", 50_000, {"validation": splits.ranked("cifar10", 50_000)[:5_000]})


def pathfinder() -> str:
    """The text of ``pathfinder.json``."""
    order = splits.ranked("pathfinder", 200_000)
    return _published("pathfinder", 200_000, {"validation": order[:20_000], "test": order[20_000:40_000]})


def s4(data_set: str) -> str:
    """The text of ``<data set>-s4.json``: what ``splits.s4_rule`` gives, so that no torch can change it."""
    rows = {"cifar10": 50_000, "pathfinder": 200_000}[data_set]
    ids = splits.s4_rule(data_set, rows)
    del ids["train"]
    return _published(f"{data_set}-s4", rows, ids, {"seed": splits.S4_SEED})


def _published(name: str, rows: int, ids: dict[str, np.ndarray], more: dict[str, object] | None = None) -> str:
    ids = {split: np.sort(chosen) for split, chosen in ids.items()}
    counts = {split: len(chosen) for split, chosen in ids.items()}
    masks = {}
    for split, chosen in ids.items():
        mask = np.zeros(rows, bool)
        mask[chosen] = True
        masks[split] = base64.b64encode(np.packbits(mask, bitorder="little")).decode()
    entry = {
        "order": ORDERS[name],
        "method": METHODS[name],
        "seed": splits.SEED,
        "rows": rows,
        "counts": {"train": rows - sum(counts.values()), **counts},
        "hash": "SHA-256 of the ids in decimal, ascending, a line each",
        "sha256": {split: splits.ids_hash(chosen) for split, chosen in ids.items()},
        **(more or {}),
        "mask": "base64; bit i % 8, lowest first, of byte i // 8 is set where id i is in the split",
        "masks": masks,
    }
    return json.dumps(entry, indent=2) + "\n"


def main() -> int:
    """Write all files."""
    parser = argparse.ArgumentParser(prog="scripts/make_splits", description="Write the published ids again.")
    parser.add_argument("--imdb", default="hub", help="folder with IMDb; the Hub or its mirror if left out")
    parser.add_argument("--data-dir", default="data", type=Path)
    parser.add_argument("--out", default=splits.FOLDER, type=Path)
    options = parser.parse_args()
    reviews = {split: text_source.read(options.imdb, options.data_dir, split) for split in text_source.SPLITS}
    texts = {
        "imdb": imdb({split: (rows.digests, rows.labels) for split, rows in reviews.items()}),
        "cifar10": cifar10(),
        "pathfinder": pathfinder(),
        "cifar10-s4": s4("cifar10"),
        "pathfinder-s4": s4("pathfinder"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (options.out / f"{name}.json").write_text(text)
        print(options.out / f"{name}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
