"""Copying and recall: rows read by a slow independent reader, answers absent from the input, equal everywhere."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from lra.config import compose_run
from lra.errors import UserError
from lra.tasks import load
from lra.tasks.copying import Config as CopyingConfig
from lra.tasks.copying import Copying
from lra.tasks.recall import Config as RecallConfig
from lra.tasks.recall import Recall

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"train_rows": 300, "validation_rows": 20, "test_rows": 30}
CONFIGS = {
    "copying": CopyingConfig(length=64, alphabet=5, **SMALL),
    "copying without delay": CopyingConfig(length=12, string_length=6, **SMALL),
    "recall by key": RecallConfig(length=64, alphabet=4, pairs=6, keys=9, queries=5, **SMALL),
    "recall of adjacent": RecallConfig(length=64, mode="adjacent", alphabet=4, pairs=6, keys=9, queries=5, **SMALL),
    "recall without delay": RecallConfig(length=24, mode="adjacent", pairs=8, **SMALL),
    "recall of many keys": RecallConfig(length=64, keys=300, **SMALL),
    "recall by position": RecallConfig(length=64, mode="position", alphabet=7, pairs=20, queries=11, **SMALL),
}

COPY = CopyingConfig(length=8, alphabet=4)
BY_KEY = RecallConfig(length=8, alphabet=4, pairs=2)
ADJACENT = RecallConfig(length=8, alphabet=4, pairs=2, mode="adjacent")
BY_POSITION = RecallConfig(length=8, alphabet=4, pairs=3, queries=2, mode="position")


def ignore(done, total):
    """Progress that nobody watches."""


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def read_slowly(config, row):
    """The answers of a row of token ids, from the description in the README alone."""
    blank, slot, first = 1, 2, 3
    if config.name == "copying":
        size = row.index(blank) if blank in row else row.index(slot)
        assert row[size:] == [blank] * (len(row) - 2 * size) + [slot] * size
        return [token - first for token in row[:size]]
    pairs = config.pairs or config.length // 8
    first_key = first + config.alphabet * ((config.keys or 2 * pairs) if config.mode == "key" else 1)
    memory = {}
    if config.mode == "key":
        while first <= row[len(memory)] < first_key:
            key, value = (row[len(memory)] - first) // config.alphabet, (row[len(memory)] - first) % config.alphabet
            assert key not in memory
            memory[key] = value
        rest = row[len(memory) :]
    elif config.mode == "position":
        while first <= row[len(memory)] < first_key:
            memory[len(memory)] = row[len(memory)] - first
        rest = row[len(memory) :]
    else:
        while row[2 * len(memory)] >= first_key and first <= row[2 * len(memory) + 1] < first_key:
            key, value = row[2 * len(memory) : 2 * len(memory) + 2]
            assert key - first_key not in memory
            memory[key - first_key] = value - first
        rest = row[2 * len(memory) :]
    queries = [token - first_key for token in rest if token != blank]
    assert rest == [blank] * (len(rest) - len(queries)) + [query + first_key for query in queries]
    assert len(set(queries)) == len(queries)
    return [memory[query] for query in queries]


@pytest.fixture(params=CONFIGS, ids=str)
def prepared(request, tmp_path):
    config = CONFIGS[request.param]
    task = load(config.name)
    return task, config, tmp_path, task.prepare(config, tmp_path, ignore)


def test_every_answer_is_what_a_slow_reader_finds(prepared):
    task, config, data, _ = prepared
    info, splits = task.load(config, data)
    assert info.splits == {"train": 300, "validation": 20, "test": 30}
    assert info.num_classes == config.alphabet
    assert splits["train"].labels.shape == (300, info.outputs)
    for split in splits.values():
        for i in range(len(split)):
            row = split.row(i).tolist()
            assert len(row) == config.length
            assert max(row) < info.vocab_size
            assert read_slowly(config, row) == split.labels[i].tolist()


def test_slots_do_not_tell_the_answer(prepared):
    """The input after the memory is the same distribution whatever the answers: rows that differ in values only."""
    task, config, data, _ = prepared
    split = task.load(config, data)[1]["train"]
    outputs = split.labels.shape[1]
    ends = np.stack([split.row(i)[-outputs:] for i in range(len(split))])
    if config.name == "copying":
        assert (ends == 2).all()
        return
    # a slot holds a key or an address; ids of values and pairs are below those
    assert (ends >= 3 + config.alphabet).all()
    # the answer to a given query is uniform: its chi-square with k - 1 degrees of freedom stays below mean + 5 sd
    counts = np.zeros((ends.max() + 1, config.alphabet))
    np.add.at(counts, (ends.ravel(), split.labels.ravel()), 1)
    seen = counts.sum(1) > 0
    expected = counts[seen].sum(1, keepdims=True) / config.alphabet
    freedom = seen.sum() * (config.alphabet - 1)
    assert ((counts[seen] - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_no_row_occurs_twice_and_verify_proves_the_rows(prepared):
    task, config, data, _ = prepared
    facts = task.verify(config, data)
    outputs = task.load(config, data)[0].outputs
    assert f"{outputs} answers a row found by reading it and equal" in facts[1]
    assert facts[-1] == "all splits: 0 rows repeat another"


def test_evaluation_rows_do_not_depend_on_the_number_of_training_rows(prepared, tmp_path_factory):
    task, config, _, folder = prepared
    fewer = type(config)(**vars(config) | {"train_rows": 100})
    other = task.prepare(fewer, tmp_path_factory.mktemp("other"), ignore)
    assert digest(folder)["test.tokens.bin"] == digest(other)["test.tokens.bin"]
    assert (folder / "train.tokens.bin").read_bytes().startswith((other / "train.tokens.bin").read_bytes())


def test_seeds_differ(prepared, tmp_path_factory):
    task, config, _, folder = prepared
    seeded = type(config)(**vars(config) | {"seed": 1})
    other = task.prepare(seeded, tmp_path_factory.mktemp("other"), ignore)
    assert digest(folder)["test.labels.bin"] != digest(other)["test.labels.bin"]


@pytest.mark.parametrize(
    ("task", "config", "row", "answers"),
    [
        (Copying, COPY, [3, 6, 1, 1, 1, 1, 2, 2], [0, 3]),
        (Copying, COPY, [3, 6, 1, 1, 1, 2, 2, 2], [-1, -1]),
        (Copying, COPY, [3, 1, 6, 1, 1, 1, 2, 2], [-1, -1]),
        # values 3..6, keys 7..10: key 2 -> value 1, key 0 -> value 3
        (Recall, ADJACENT, [9, 4, 7, 6, 1, 1, 7, 9], [3, 1]),
        (Recall, ADJACENT, [9, 4, 9, 6, 1, 1, 7, 9], [-1, -1]),
        (Recall, ADJACENT, [9, 4, 7, 6, 1, 1, 7, 8], [3, -1]),
        (Recall, ADJACENT, [9, 4, 7, 8, 1, 1, 7, 9], [-1, -1]),
        (Recall, ADJACENT, [9, 4, 7, 6, 1, 1, 7, 3], [3, -1]),
        # key k with value v is 3 + 4 k + v, keys 19..22: key 2 -> value 1, key 0 -> value 3
        (Recall, BY_KEY, [12, 6, 1, 1, 1, 1, 19, 21], [3, 1]),
        (Recall, BY_KEY, [12, 6, 1, 1, 1, 1, 20, 21], [-1, 1]),
        (Recall, BY_KEY, [12, 11, 1, 1, 1, 1, 19, 21], [-1, -1]),
        (Recall, BY_KEY, [12, 19, 1, 1, 1, 1, 19, 21], [-1, -1]),
        (Recall, BY_KEY, [12, 6, 1, 2, 1, 1, 19, 21], [-1, -1]),
        # values 3..6, addresses 7..9: position 2 holds value 3, position 0 value 1
        (Recall, BY_POSITION, [4, 3, 6, 1, 1, 1, 9, 7], [3, 1]),
        (Recall, BY_POSITION, [4, 3, 6, 3, 1, 1, 9, 7], [-1, -1]),
    ],
)  # fmt: skip
def test_rows_by_hand(task, config, row, answers):
    assert task.answers(config, np.array([row])).tolist() == [answers]


def test_verify_finds_a_wrong_answer(tmp_path):
    config = CONFIGS["recall by key"]
    folder = Recall.prepare(config, tmp_path, ignore)
    labels = np.fromfile(folder / "test.labels.bin", "<i8").reshape(30, 5)
    i = np.flatnonzero(labels[:, 0] != labels[:, 1])[0]
    wrong = labels.copy()
    wrong[i, [0, 1]] = labels[i, [1, 0]]
    (folder / "test.labels.bin").write_bytes(wrong.tobytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["test"]["files"]["labels"]["sha256"] = hashlib.sha256(wrong.tobytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    message = rf"expected slot 0 of row {i} of test to have answer {labels[i, 1]}, found {labels[i, 0]}; delete"
    with pytest.raises(UserError, match=message):
        Recall.verify(config, tmp_path)


def test_keys_queries_and_values_are_uniform(tmp_path):
    config = RecallConfig(length=32, mode="adjacent", alphabet=4, pairs=6, keys=12, queries=3, train_rows=4000)
    Recall.prepare(config, tmp_path, ignore)
    info, splits = Recall.load(config, tmp_path)
    rows = np.stack([splits["train"].row(i) for i in range(4000)])
    # 24,000 keys of 12 kinds and values of 4, 12,000 queries of 12 kinds: 5 standard deviations
    for tokens, first, kinds in ((rows[:, 0:12:2], 7, 12), (rows[:, 1:12:2], 3, 4), (rows[:, -3:], 7, 12)):
        share = np.bincount(tokens.ravel() - first, minlength=kinds) / tokens.size
        assert share == pytest.approx(1 / kinds, abs=5 * np.sqrt((1 / kinds) / tokens.size))
    assert info.majority_baseline == np.bincount(splits["test"].labels.ravel()).max() / splits["test"].labels.size
    assert info.majority_baseline == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(
    ("config", "sha256"),
    [(CopyingConfig(length=64, **SMALL), "efa6a640785748893"), (RecallConfig(length=64, **SMALL), "53555c465bbdbd78"),
     (RecallConfig(length=64, mode="adjacent", **SMALL), "1d242455b336bc9e"),
     (RecallConfig(length=64, mode="position", **SMALL), "b2867e5335be6639")],
    ids=["copying", "key", "adjacent", "position"],
)  # fmt: skip
def test_rows_are_the_same_in_every_process(tmp_path, config, sha256):
    # a change means other data under the same version: raise VERSION, do not only update this
    code = (
        f"import pathlib; from lra.tasks import load; task = load({config.name!r})\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        f"print(task.prepare(task.Config(**{vars(config)!r}), folder, lambda done, total: None))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert digest(Path(done.stdout.strip()))["train.tokens.bin"].startswith(sha256)


def test_too_few_distinct_rows_are_reported(tmp_path):
    config = CopyingConfig(length=16, alphabet=2, string_length=5, train_rows=20, validation_rows=8, test_rows=8)
    with pytest.raises(UserError, match=r"2 symbols in 16 tokens: expected 36 distinct rows, .* no more than 32; ask"):
        Copying.prepare(config, tmp_path, ignore)
    assert not list((tmp_path / "copying").glob("length*"))


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Copying, {"length": 7}, r"task.length=7: copying takes 8..65536"),
        (Copying, {"alphabet": 1}, r"task.alphabet=1: copying takes 2..256"),
        (Copying, {"train_rows": 0}, r"task.train_rows=0: copying takes 1.."),
        (Copying, {"string_length": 129}, r"task.string_length=129: .* task.length=256 tokens; choose 1..128"),
        (Copying, {"string_length": -1}, r"task.string_length=-1: "),
        (Copying, {"fidelity": "s4"}, r"task.fidelity='s4': copying takes lra"),
        (Copying, {"source": "hub"}, r"task.source=hub: copying takes"),
        (Copying, {"source": "folder"}, r"task.source=folder: rows of copying are generated; leave it out"),
        (Recall, {"mode": "keys"}, r"task.mode='keys': recall takes key \| adjacent \| position"),
        (Recall, {"mode": "position", "keys": 9}, r"task.keys=9: task.mode=position has none"),
        (Recall, {"pairs": 20, "keys": 19}, r"task.keys=19: every pair .* give 20 or more"),
        (Recall, {"pairs": 20, "queries": 21}, r"task.queries=21: recall takes 0..20"),
        (Recall, {"pairs": 129}, r"task.pairs=129, task.queries=129: they fill 258 tokens, task.length=256 has fewer"),
        (Recall, {"pairs": 86, "mode": "adjacent"}, r"task.pairs=86, .* fill 258 tokens"),
        (Recall, {"pairs": 64, "keys": 5000}, r"task.keys=5000, task.alphabet=16: they make 85003 token ids, .* 65536"),
        (Recall, {"pairs": 257}, r"task.pairs=257: recall takes 0..256"),
    ],
)
def test_impossible_options_are_refused(tmp_path, task, options, message):
    for use in (task.load, task.verify, lambda c, d: task.prepare(c, d, ignore)):
        with pytest.raises(UserError, match=message):
            use(task.Config(**options), tmp_path)


def test_defaults_name_the_rows_that_they_stand_for(tmp_path):
    def name(config):
        return load(config.name).folder(config, tmp_path).name

    assert name(CopyingConfig(string_length=64)) == name(CopyingConfig()) == "length256-generated-v1"
    assert name(CopyingConfig(string_length=32)) == "length256-generated-stringlength32-v1"
    assert name(RecallConfig(pairs=32, keys=64, queries=32)) == name(RecallConfig())
    assert name(RecallConfig(mode="position", queries=8)) == "length256-generated-modeposition-queries8-v1"


@pytest.mark.parametrize("regime", ["short", "medium", "long", "extreme"])
@pytest.mark.parametrize(
    "choice",
    [["task=copying"], ["task=recall"], ["task=recall", "task.mode=adjacent"], ["task=recall", "task.mode=position"]],
    ids=str,
)
def test_every_regime_composes(choice, regime):
    config = compose_run([*choice, f"regime={regime}"]).task
    task = load(config.name)
    tokens, labels = task.chunk(config, np.random.default_rng(0), 2)
    assert tokens.shape == (2, config.length)
    assert task.answers(config, tokens).tolist() == labels.tolist()


@pytest.mark.parametrize(("task", "config"), [(Copying, CopyingConfig()), (Recall, RecallConfig())], ids=str)
def test_yaml_and_registry_name_this_task(task, config):
    text = OmegaConf.load(ROOT / "conf" / "task" / f"{config.name}.yaml")
    assert text.pop("defaults") == [f"{config.name}_schema", "_self_"]
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(type(config)), text)) == config
    assert load(config.name) is task
