"""Memory that ends and numbers that are none: results, with the place where it happened."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import attention
from lra import results
from lra.config import compose_run
from lra.determinism import deterministic
from lra.memory_limit import is_out_of_memory, memory_limit
from lra.train import run
from lra.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def fail_above(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends for more than ``rows`` rows at once."""
    original = Trainer._step

    def step(self: Trainer, number: int, batches: list, *rest: object) -> tuple[float, float]:
        if max(len(batch.labels) for batch in batches) > rows:
            torch.rand(7)  # the failed attempt has used random numbers
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")
        return original(self, number, batches, *rest)

    monkeypatch.setattr(Trainer, "_step", step)


def test_out_of_memory_says_rows_and_length(tiny, monkeypatch):
    fail_above(0, monkeypatch)
    row = run(compose_run(tiny))
    assert row.status == "oom"
    assert row.oom_rows == 8
    assert 16 < row.oom_length < 64
    assert f"out of memory with 8 rows of {row.oom_length} tokens at once: CUDA out of memory" in row.error
    assert not row.resumable


def test_halving_gives_the_same_training_with_fewer_rows_at_once(tiny, tmp_path, monkeypatch):
    halved = compose_run([*tiny, "trainer.on_oom=halve", "trainer.log_every=1"])
    with monkeypatch.context() as patch:
        fail_above(2, patch)
        row = run(halved)
    assert (row.status, row.accumulation) == ("ok", 4) or (row.status, row.accumulation) == ("stuck", 4)
    assert row.warnings == [
        "out of memory with 8 rows at once at step 1: went on with half of them",
        "out of memory with 4 rows at once at step 1: went on with half of them",
    ]
    # the same random numbers as a run that was cut into four from the start
    parts = compose_run([*tiny, "trainer.accumulation=4", "trainer.log_every=1", f"runs_dir={tmp_path / 'parts'}"])
    assert run(parts).test_loss == pytest.approx(row.test_loss, abs=1e-12)


def test_halving_ends_with_one_row(tiny, monkeypatch):
    fail_above(0, monkeypatch)
    row = run(compose_run([*tiny, "trainer.on_oom=halve"]))
    assert (row.status, row.oom_rows, row.accumulation) == ("oom", 1, 8)


def test_a_memory_limit_on_the_cpu_is_a_result(tiny, tmp_path):
    # the materialised n x n scores of 256 rows of 63 tokens need far more than 2 MiB; in a process of its own, because
    # what malloc has kept from earlier tests is within no limit
    wide = [*tiny, "attention=softmax", "trainer.batch_size=256", "trainer.memory_limit_gib=0.002"]
    subprocess.run([sys.executable, "-m", "lra.train", *wide], cwd=ROOT, capture_output=True, timeout=120)
    (row,) = results.load_all(tmp_path / "runs")
    assert row.status == "oom", row.error
    assert row.oom_rows == 256


def test_a_memory_limit_ends_with_its_block():
    with memory_limit(0.002, torch.device("cpu")):
        pass
    assert torch.zeros(64 << 20, dtype=torch.uint8).sum() == 0


def test_the_signs_of_ended_memory():
    cpu = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried 10 bytes"
    assert is_out_of_memory(RuntimeError(cpu))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    with memory_limit(0.01, torch.device("cpu")), pytest.raises(RuntimeError) as caught:
        torch.zeros(1 << 30)
    assert is_out_of_memory(caught.value)
    # oneDNN tells of nothing but a failure: below a limit it is taken for memory
    primitive = RuntimeError("could not create a primitive")
    assert not is_out_of_memory(primitive)
    with memory_limit(1, torch.device("cpu")):
        assert is_out_of_memory(primitive)


def test_nan_names_step_module_rows_and_the_last_good_checkpoint(tiny, monkeypatch):
    config = compose_run([*tiny, "trainer.eval_every=4"])
    original = Trainer._step

    def poisoned(self: Trainer, number: int, *rest: object) -> tuple[float, float]:
        if number == 6:
            with torch.no_grad():
                self.model.encoder.blocks[1].channel_mixer.contract.bias[0] = float("nan")
        return original(self, number, *rest)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    row = run(config)
    assert row.status == "failed"
    assert "the loss is nan at step 6" in row.error
    assert "encoder.blocks.1.channel_mixer.contract.bias" in row.error
    assert "training rows" in row.error
    assert "last good checkpoint: step 4" in row.error
    assert "rows of the batch of step 6: [" in (config.run_dir / "train.log").read_text()


def test_the_module_whose_output_overflows_is_named(tiny, monkeypatch):
    original = Trainer._step

    def poisoned(self: Trainer, number: int, *rest: object) -> tuple[float, float]:
        if number == 3:
            with torch.no_grad():
                self.model.encoder.blocks[0].channel_mixer.expand.weight.fill_(3e38)
        return original(self, number, *rest)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    row = run(compose_run(tiny))
    assert row.status == "failed"
    assert "first seen in the output of encoder.blocks.0.channel_mixer.expand" in row.error


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_a_batch_of_one_row(tiny, name):
    row = run(compose_run([*tiny, f"attention={name}", "trainer.batch_size=1", "trainer.steps=8", "trainer.warmup=1"]))
    assert row.status in ("ok", "stuck")


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_recomputed_activations_give_the_same_curve(tiny, tmp_path, name):
    losses = []
    for folder, extra in (("a", []), ("b", ["trainer.activation_checkpointing=true"])):
        config = compose_run([*tiny, f"attention={name}", f"runs_dir={tmp_path / folder}", *extra])
        losses.append(run(config).test_loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_deterministic_mode_says_what_it_could_not_make_so(tiny):
    with warnings.catch_warnings(), deterministic(True) as surprises:
        warnings.simplefilter("always")
        assert torch.are_deterministic_algorithms_enabled()
        warnings.warn("adaptive_pool_backward does not have a deterministic implementation", stacklevel=1)
    assert surprises == ["adaptive_pool_backward does not have a deterministic implementation"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert run(compose_run([*tiny, "trainer.deterministic=true"])).status in ("ok", "stuck")
