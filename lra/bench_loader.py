"""Rows and tokens a second of the input pipeline, beside a plain loop over ``datasets`` with the same rows.

Both make the same padded batches and masks on the CPU, interleaved in one process; medians with quartiles.

Shapes: B rows a batch.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import lra.tasks
from lra.config import compose_run
from lra.data.arrays import Split
from lra.data.loader import Batch, make_batch, train_indices
from lra.data.sources import plain_rows
from lra.errors import UserError

MOST_ROWS = 2000
"""Rows that the plain loop holds; more would only take longer to convert."""


def main() -> int:
    """Measure every task that is named, at the length that the overrides give."""
    parser = argparse.ArgumentParser(prog="scripts/bench_loader", description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", help="default: all that are prepared")
    parser.add_argument("--override", action="append", default=[], help="such as task.length=4096; may be repeated")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    print(f"{'task':<12} {'length':>6} {'rows/s':>9} {'tokens/s':>12} {'plain rows/s':>13} {'ratio':>7}  quartiles")
    for name in options.tasks or lra.tasks.REGISTRY:
        try:
            config = compose_run([f"task={name}", *options.override])
            _, splits = lra.tasks.load(name).load(config.task, Path(config.data_dir))
        except UserError as error:
            print(f"{'error' if options.tasks else f'{name} is left out'}: {error}", file=sys.stderr)
            if options.tasks:
                return 2
            continue
        print(measure(name, config.task.length, splits["train"], options.batch_size, options.batches))
    return 0


def measure(name: str, length: int, split: Split, batch_size: int, batches: int) -> str:
    """One line of the table."""
    rows = np.arange(min(MOST_ROWS, len(split)))
    indices = [i % len(rows) for i in islice(train_indices(split, batch_size, 0), batches)]
    plain = plain_loop(split, rows)
    device = torch.device("cpu")
    ours, theirs = [], []
    for batch in indices:
        seconds, made = _timed(lambda batch=batch: make_batch(split, batch, device))
        other_seconds, other = _timed(lambda batch=batch: plain(batch))
        if not (torch.equal(made.tokens, other.tokens) and torch.equal(made.key_mask, other.key_mask)):
            raise AssertionError("the plain loop made other batches")
        ours.append(seconds)
        theirs.append(other_seconds)
    ratios = [b / a for a, b in zip(ours, theirs)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds, other_seconds = statistics.median(ours), statistics.median(theirs)
    tokens = statistics.mean(int(split.sequence_lengths.reshape(len(split), -1)[b].sum()) for b in indices)
    return (
        f"{name:<12} {length:>6} {batch_size / seconds:>9,.0f} {tokens / seconds:>12,.0f} "
        f"{batch_size / other_seconds:>13,.0f} {middle:>7.1f}  {low:.1f} - {high:.1f}"
    )


def plain_loop(split: Split, rows: np.ndarray) -> Callable[[np.ndarray], Batch]:
    """What a user writes first: take rows of a data set, make tensors of them, pad them."""
    tokens, lengths = split.rows(rows)
    data = plain_rows(
        {
            "tokens": [row[:length].tolist() for row, length in zip(tokens, lengths)],
            "row": np.repeat(rows, split.documents).tolist(),
        }
    )

    def collate(indices: np.ndarray) -> Batch:
        at = (indices[:, None] * split.documents + np.arange(split.documents)).ravel()
        found = [torch.tensor(row) for row in data[at.tolist()]["tokens"]]
        padded = pad_sequence(found, batch_first=True)
        mask = torch.arange(padded.shape[1])[None] < torch.tensor([len(row) for row in found])[:, None]
        return Batch(padded, mask, torch.as_tensor(split.labels[indices]), sum(map(len, found)))

    return collate


def _timed(run: Callable[[], Batch]) -> tuple[float, Batch]:
    start = time.perf_counter()
    batch = run()
    return time.perf_counter() - start, batch


if __name__ == "__main__":
    raise SystemExit(main())
