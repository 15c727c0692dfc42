"""ListOps expressions and generated rows against LRA's definition, read literally, and real expressions."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lra.data.arrays import row_hashes
from lra.regimes import POINTS
from lra.tasks import listops_expressions as expressions
from lra.tasks.listops import decode, default_depth, evaluate, tokenise
from lra.tasks.listops_generator import Grammar, chunk
from tests.lra.listops_reference import reference_tree, value_of

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "listops"
NATIVE = Grammar(2000, 10, 10)
PUBLISHED_LABELS = [16.9, 9.4, 7.1, 7.7, 8.7, 8.9, 8.2, 6.8, 9.3, 17.0]
"""Per cent, from 6,000 rows of LRA's procedure."""


def texts(rows):
    return [decode(row) for row in np.split(rows.tokens, np.cumsum(rows.lengths)[:-1])]


@pytest.fixture(scope="module")
def native():
    """About 3,000 rows of LRA's own length."""
    return [chunk(NATIVE, 0, i) for i in range(10)]


def test_ids_are_those_that_prepared_data_holds():
    assert ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789") == expressions.SYMBOLS
    assert list(expressions.IDS.values()) == list(range(1, 16))
    assert expressions.VOCAB_SIZE == 16


@pytest.mark.parametrize("hash_seed", ["0", "1", "12345"])
def test_ids_do_not_depend_on_the_process(hash_seed):
    code = "from lra.tasks.listops import tokenise as t; print(t('[SM [MED 0 9 ] [MIN 1 ] [MAX 5 ] ]').tolist())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(result.stdout) == [4, 3, 6, 15, 5, 1, 7, 5, 2, 11, 5, 5]


def test_decode_inverts_tokenise_and_drops_padding():
    text = "[MAX 2 [SM 3 9 ] ]"
    ids = tokenise("( ( [MAX 2 ) ( ( ( [SM 3 ) 9 ) ] ) ) ]")
    assert decode(ids) == text
    assert decode(np.concatenate((ids, [0, 0]))) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7),
        ("[MED 1 2 ]", 1),
        ("[MED 9 0 5 8 ]", 6),
        ("[MED 3 ]", 3),
        ("[SM 9 9 9 ]", 7),
        ("[MIN 3 [MAX 1 2 ] ]", 2),
        ("[SM 1 [MED 0 9 9 ] [SM 5 6 ] ]", 1),
        ("]", -1),
        ("[MIN ]", -1),
        ("[MIN 1", -1),
        ("[MIN [MAX 1 2 ]", -1),
        ("[MIN 1 ] ]", -1),
        ("1 2", -1),
        ("[MIN 1 2 ] 3", -1),
        ("[MAX " + "1 " * 11 + "]", -1),
    ],
)
def test_evaluate(text, expected):
    row = tokenise(text)
    # between a row that would close what it opens and one that would open what it closes
    around = [tokenise("[MIN 1"), row, tokenise("2 ]"), row]
    values = evaluate(np.concatenate(around), np.array([len(x) for x in around]))
    assert values.tolist() == [-1, expected, -1, expected]


def test_labels_agree_with_a_recursive_evaluator(native):
    for rows in native[:3]:
        assert [value_of(text) for text in texts(rows)] == rows.labels.tolist()
        assert evaluate(rows.tokens, rows.lengths).tolist() == rows.labels.tolist()


def test_lengths_and_labels_are_distributed_as_published(native):
    lengths = np.concatenate([rows.lengths for rows in native])
    labels = np.concatenate([rows.labels for rows in native])
    assert len(labels) > 3000
    assert 501 <= lengths.min() <= 510
    assert 1990 <= lengths.max() <= 1999
    assert np.quantile(lengths, [0.25, 0.5, 0.75]) == pytest.approx([706, 961, 1313], rel=0.05)
    share = np.bincount(labels, minlength=10) / len(labels)
    published = np.array(PUBLISHED_LABELS) / 100
    # both are samples: chi-square of two samples, 9 degrees of freedom, exceeded once in 10,000
    variance = published * (1 / len(labels) + 1 / 6000)
    assert ((share - published) ** 2 / variance).sum() < 33.7


@pytest.mark.slow
def test_rows_are_distributed_as_a_literal_generator_makes_them(native):
    rng = random.Random(0)
    trees = [tree for tree in (reference_tree(rng) for _ in range(20_000)) if 500 < len(tree) < 2000]
    lengths = np.array([len(tree) for tree in trees])
    ours = np.concatenate([rows.lengths for rows in native])
    # Kolmogorov-Smirnov distance of two samples, exceeded once in 10,000
    grid = np.arange(500, 2000)
    distance = np.abs((lengths[:, None] <= grid).mean(0) - (ours[:, None] <= grid).mean(0)).max()
    assert distance < 2.23 * np.sqrt(1 / len(lengths) + 1 / len(ours))
    symbols = Counter(symbol for tree in trees for symbol in tree)
    counts = sum(np.bincount(rows.tokens, minlength=16) for rows in native)[1:]
    expected = np.array([symbols[symbol] for symbol in expressions.SYMBOLS])
    assert counts / counts.sum() == pytest.approx(expected / expected.sum(), rel=0.02)


def test_operators_arguments_and_nesting(native):
    operators, arities, digits, depths = Counter(), Counter(), Counter(), []
    for rows in native:
        for text in texts(rows):
            open_arities, deepest = [0], 0
            for symbol in text.split():
                if symbol == "]":
                    arities[open_arities.pop()] += 1
                elif symbol.startswith("["):
                    operators[symbol] += 1
                    open_arities[-1] += 1
                    open_arities.append(0)
                    deepest = max(deepest, len(open_arities) - 1)
                else:
                    digits[symbol] += 1
                    open_arities[-1] += 1
            depths.append(deepest)
    for counts, kinds in ((operators, 4), (digits, 10)):
        shares = np.array(list(counts.values())) / counts.total()
        assert shares == pytest.approx([1 / kinds] * kinds, rel=0.02)
    # the length filter favours many arguments near the root, so this is only nearly uniform
    assert sorted(arities) == list(range(2, 11))
    assert np.array(list(arities.values())) / arities.total() == pytest.approx([1 / 9] * 9, rel=0.1)
    assert max(depths) == 9
    assert np.mean(np.array(depths) == 9) > 0.99


def test_a_chunk_depends_on_its_seed_and_index_only():
    later, first = chunk(NATIVE, 3, 1), chunk(NATIVE, 3, 0)
    again = chunk(NATIVE, 3, 1)
    assert all(np.array_equal(a, b) for a, b in zip(later, again))
    assert not set(row_hashes(first.tokens, first.lengths)) & set(row_hashes(later.tokens, later.lengths))


@pytest.mark.parametrize("length", [16, *(n for n in POINTS.values() if n)])
def test_every_regime_has_rows_of_its_length(length):
    rows = chunk(Grammar(length, default_depth(length), 10), 0, 0)
    assert len(rows.labels) > 10
    assert rows.lengths.min() > length / 4
    assert rows.lengths.max() < length
    assert evaluate(rows.tokens, rows.lengths).tolist() == rows.labels.tolist()


def test_depth_grows_beyond_the_native_length():
    assert [default_depth(n) for n in (16, 256, 2000, 4096, 16_384, 32_768)] == [10, 10, 10, 12, 15, 17]


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real ListOps rows in {REAL}")
def test_real_rows_in_nyu_format():
    lines = (REAL / "nyu_listops" / "test_d20s.tsv").read_text().splitlines()
    labels, sources = zip(*(line.split("\t") for line in lines))
    rows = [tokenise(source) for source in sources]
    values = evaluate(np.concatenate(rows), np.array([len(row) for row in rows]))
    assert len(values) == 10_000
    assert values.tolist() == [int(label) for label in labels]
    assert [value_of(decode(row)) for row in rows] == values.tolist()
