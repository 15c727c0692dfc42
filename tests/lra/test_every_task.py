"""Every task with every backend: from its source over the prepared rows to a result, by the registries.

The real samples serve where they are; elsewhere small files in the same layouts.
"""

import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import attention
import lra.tasks
from lra.config import compose_run
from lra.train import run

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT.parent / "shared" / "data"
ROWS = {"train_rows": 96, "validation_rows": 16, "test_rows": 16}
LENGTHS = {
    "listops": 128, "text": 256, "retrieval": 128, "image": 256, "pathfinder": 256, "pathx": 16384,
    "copying": 64, "recall": 64,
}  # fmt: skip
STEPS = {"pathx": 3}


def text_source(folder: Path) -> Path:
    if (real := SAMPLES / "text" / "stanfordnlp" / "imdb").is_dir():
        return real
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        texts = [" ".join(rng.choice(["good", "bad", "film"], 60)) for _ in range(200)]
        table = pyarrow.table({"text": texts, "label": [i % 2 for i in range(200)]})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder


def image_source(folder: Path) -> Path:
    if (real := SAMPLES / "image" / "uoft-cs" / "cifar10").is_dir():
        return real
    rng = np.random.default_rng(0)
    for split, rows in (("train", 200), ("test", 100)):
        images = []
        for _ in range(rows):
            buffer = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
            images.append({"bytes": buffer.getvalue(), "path": None})
        table = pyarrow.table({"img": images, "label": [i % 10 for i in range(rows)]})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return folder


def retrieval_source(folder: Path) -> Path:
    if (real := SAMPLES / "retrieval" / "lra_format_sample").is_dir():
        return real
    for name, rows in (("train", 24), ("eval", 8), ("test", 8)):
        lines = [f"{i % 2}.0\t{i}\t{i + 1}\tabout parsing {i}\tabout tagging {i}\n" for i in range(rows)]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("".join(lines))
    return folder


SOURCES = {"text": text_source, "image": image_source, "retrieval": retrieval_source}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Overrides of each task, its rows prepared once for all backends."""
    data = tmp_path_factory.mktemp("every")
    found = {}

    def overrides(name: str) -> list[str]:
        if name not in found:
            given = [f"task={name}", f"task.length={LENGTHS[name]}", f"data_dir={data}"]
            if name in SOURCES:
                folder = data / f"source-{name}"
                folder.mkdir()
                given.append(f"task.source={SOURCES[name](folder)}")
            rows = {"train_rows": 16, "validation_rows": 8, "test_rows": 8} if name == "retrieval" else ROWS
            if name == "pathx":
                rows = {"train_rows": 4, "validation_rows": 1, "test_rows": 1}
            given += [f"task.{key}={count}" for key, count in rows.items()]
            config = compose_run(given)
            lra.tasks.load(name).prepare(config.task, data, lambda done, total: None)
            found[name] = given
        return found[name]

    return overrides


def test_every_task_of_the_registry_is_covered():
    assert set(LENGTHS) == set(lra.tasks.REGISTRY)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", list(attention.REGISTRY))
@pytest.mark.parametrize("name", list(lra.tasks.REGISTRY))
def test_it_trains(prepared, tmp_path, name, mixer):
    if name == "pathx" and mixer == "softmax":
        pytest.skip("16384 x 16384 scores are the reason why nobody runs this")
    steps = STEPS.get(name, 20)
    config = compose_run(
        [
            *prepared(name), f"attention={mixer}", "trainer=smoke", f"trainer.steps={steps}", "trainer.warmup=1",
            "trainer.timing_warmup=1", "trainer.batch_size=1" if name == "pathx" else "trainer.batch_size=8",
            "model.width=16", "model.ffn_width=16", "tracking=disabled", f"runs_dir={tmp_path}",
        ]
    )  # fmt: skip
    row = run(config)
    assert row.status in ("ok", "stuck"), row.error
    assert row.steps == steps
    info = lra.tasks.load(name).load(config.task, Path(config.data_dir))[0]
    assert row.test_labels == info.splits["test"] * max(1, info.outputs)
    assert row.data_source == info.source
    assert sum(row.lengths["histogram"]["counts"]) == info.splits["train"] * info.documents
    assert row.majority_baseline == info.majority_baseline


@pytest.mark.parametrize("name", list(lra.tasks.REGISTRY))
def test_ids_fit_the_vocabulary_and_labels_the_classes(prepared, name):
    config = compose_run(prepared(name))
    info, splits = lra.tasks.load(name).load(config.task, Path(config.data_dir))
    for split in splits.values():
        tokens, lengths = split.rows(np.arange(len(split)))
        assert tokens.max() < info.vocab_size
        assert lengths.max() <= info.length
        assert split.labels.min() >= 0
        assert split.labels.max() < info.num_classes
    counts = np.bincount(splits["test"].labels.ravel())
    assert info.majority_baseline == counts.max() / counts.sum()


@pytest.mark.parametrize("name", list(lra.tasks.REGISTRY))
def test_verify_proves_what_was_prepared(prepared, name):
    config = compose_run(prepared(name))
    facts = lra.tasks.load(name).verify(config.task, Path(config.data_dir))
    assert [fact.split(":")[0] for fact in facts[1:4]] == ["train", "validation", "test"]
