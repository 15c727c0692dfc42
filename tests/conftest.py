"""Settings of all tests: no network, no terminal output of trackers, own data and run directories."""

import os

os.environ.update(
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    WANDB_ERROR_REPORTING="false",
    HF_HUB_OFFLINE="1",
    TQDM_DISABLE="1",
)
os.environ.pop("WANDB_API_KEY", None)

from pathlib import Path

import pytest

TINY = ("task.train_rows=256", "task.validation_rows=64", "task.test_rows=64", "task.length=64")
"""Overrides of a ListOps small enough to train on within a second."""


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with tiny ListOps in it."""
    import lra.tasks
    from lra.config import compose_run

    folder = tmp_path_factory.mktemp("data")
    config = compose_run(["task=listops", *TINY])
    lra.tasks.load("listops").prepare(config.task, folder, lambda done, total: None)
    return folder


@pytest.fixture
def tiny(tiny_data: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run that ends within seconds and writes below ``tmp_path``."""
    return [
        "task=listops",
        *TINY,
        "trainer=smoke",
        "model.width=16",
        "model.ffn_width=16",
        "tracking=disabled",
        f"data_dir={tiny_data}",
        f"runs_dir={tmp_path / 'runs'}",
    ]
