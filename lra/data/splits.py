"""Which rows are validation: fixed, published, the same for everybody.

The data sets come without a validation split (IMDb, CIFAR-10) or without any (Pathfinder). ``splits/*.json`` publish
ours as ids, one bit a row. Every choice is the first rows in the order of a SHA-256, which no library's random
numbers can change; ``lra.make_splits`` writes the same files again, byte for byte.

``cifar10-s4`` and ``pathfinder-s4`` are the splits of the S4 repository, which ``task.fidelity=s4`` takes.

Ids: of CIFAR-10 the position in train of the Hub's copy, of Pathfinder the position in the release, as each file says
under ``order``. Copies of IMDb come in several orders, so there an id is the rank of the row's text by its SHA-256:
the content is the id, and no order can be wrong.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from lra.errors import UserError

FOLDER = Path(__file__).with_name("splits")
SEED = 0
S4_SEED = 42


def load(name: str) -> dict[str, np.ndarray]:
    """The ids of each split of the file ``name``.json, ascending int64; train is what is left."""
    entry = _read(name)
    ids = {split: np.flatnonzero(_unpack(mask, entry["rows"])) for split, mask in entry["masks"].items()}
    left = np.ones(entry["rows"], bool)
    for split, chosen in ids.items():
        left[chosen] = False
        if ids_hash(chosen) != entry["sha256"][split]:
            raise UserError(f"{FOLDER / name}.json: the ids of {split} do not have their sha256; restore the file")
    return {"train": np.flatnonzero(left), **ids}


def s4_ids(data_set: str, rows: int) -> dict[str, np.ndarray]:
    """The splits of the S4 repository for ``rows`` of ``cifar10``'s train or of a set of ``pathfinder``."""
    name = f"{data_set}-s4"
    return load(name) if rows == _read(name)["rows"] else s4_rule(data_set, rows)


def s4_rule(data_set: str, rows: int) -> dict[str, np.ndarray]:
    """What torch's ``random_split`` gives with S4's seed, each split ascending.

    state-spaces/s4, src/dataloaders: ``base.py`` takes 90 % of CIFAR-10 for training and the rest for validation,
    ``lra.py`` a tenth each of Pathfinder for validation and test, which follow the training rows.
    """
    import torch

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(S4_SEED)).numpy()
    tenth = int(0.1 * rows)
    if data_set == "cifar10":
        at = int(rows * (1.0 - 0.1))
        parts = {"train": order[:at], "validation": order[at:]}
    else:
        at = rows - 2 * tenth
        parts = {"train": order[:at], "validation": order[at : at + tenth], "test": order[at + tenth :]}
    return {split: np.sort(ids).astype(np.int64) for split, ids in parts.items()}


def fingerprints(name: str) -> dict[str, str]:
    """What ``fingerprint`` gives for the published splits of ``imdb``."""
    return _read(name)["fingerprints"]


def ranked(key: str, rows: int) -> np.ndarray:
    """The numbers 0..rows-1 in the order of SHA-256('seed:key:number')."""
    keys = [_key(key, str(i)) for i in range(rows)]
    return np.array(sorted(range(rows), key=keys.__getitem__), dtype=np.int64)


def text_order(digests: list[bytes], labels: np.ndarray) -> np.ndarray:
    """Positions of the rows with the texts' ``digests`` (SHA-256) in the order of the ids, (R,)."""
    return np.array(sorted(range(len(digests)), key=lambda i: (digests[i], labels[i])), dtype=np.int64)


def fingerprint(digests: list[bytes], labels: np.ndarray) -> str:
    """Hash of the texts and labels of a split that does not depend on the order of the rows."""
    rows = sorted(digest + bytes([label]) for digest, label in zip(digests, labels.tolist()))
    return hashlib.sha256(b"".join(rows)).hexdigest()


def text_validation(digests: list[bytes], labels: np.ndarray) -> np.ndarray:
    """Ids of the validation rows, ascending, by the method published for ``imdb``; for any rows with labels."""
    order = text_order(digests, labels)
    chosen = []
    for label in np.unique(labels):
        groups: dict[bytes, list[int]] = {}
        for i, position in enumerate(order.tolist()):
            if labels[position] == label:
                groups.setdefault(digests[position], []).append(i)
        left = int((labels == label).sum()) // 10
        for digest in sorted(groups, key=lambda digest: _key("imdb", digest.hex())):
            if len(groups[digest]) <= left:
                chosen += groups[digest]
                left -= len(groups[digest])
    return np.sort(np.array(chosen, dtype=np.int64))


def _key(key: str, row: str) -> bytes:
    return hashlib.sha256(f"{SEED}:{key}:{row}".encode()).digest()


def ids_hash(ids: np.ndarray) -> str:
    """SHA-256 of the ids in decimal, ascending, a line each."""
    return hashlib.sha256("".join(f"{i}\n" for i in ids.tolist()).encode()).hexdigest()


def _unpack(mask: str, rows: int) -> np.ndarray:
    packed = np.frombuffer(base64.b64decode(mask), np.uint8)
    return np.unpackbits(packed, count=rows, bitorder="little").astype(bool)


def _read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())
