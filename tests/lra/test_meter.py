"""The meter: accounts add up, parts of a step add up, what cannot be measured is None, a resumed run goes on."""

import io
import statistics
import time

import pytest
import torch
from torch import nn

from lra.memory import MemoryGauge
from lra.meter import Meter

CPU = torch.device("cpu")


def test_accounts_are_separate_and_cover_the_time():
    meter = Meter(CPU, warmup_steps=1)
    start = time.perf_counter()
    for _ in range(3):
        with meter.account("data"):
            time.sleep(0.01)
        with meter.step(real_tokens=6, padded_tokens=8):
            time.sleep(0.02)
    with meter.evaluation():
        time.sleep(0.03)
    total = time.perf_counter() - start
    seconds = meter.report()["seconds"]
    assert seconds.data >= 0.03
    assert seconds.compute >= 0.06
    assert seconds.evaluation >= 0.03
    assert seconds.data + seconds.compute + seconds.evaluation <= total
    assert seconds.compile is None
    assert seconds.logging is None


def test_warmup_is_dropped_from_the_rates_and_counted():
    meter = Meter(CPU, warmup_steps=2)
    for duration in (0.2, 0.2, 0.01, 0.01, 0.01):
        with meter.step(real_tokens=10, padded_tokens=20):
            time.sleep(duration)
    report = meter.report()
    assert report["steps"] == 5
    assert report["warmup_steps_dropped"] == 2
    assert 10 <= report["step_ms"] < 100
    low, high = report["step_ms_quartiles"]
    assert low <= report["step_ms"] <= high
    assert report["tokens_per_second"] == pytest.approx(10 * report["steps_per_second"])
    assert report["padded_share"] == pytest.approx(0.5)


def test_no_timed_step_gives_none_and_not_zero():
    report = Meter(CPU, warmup_steps=5).report()
    for key in ("step_ms", "step_ms_quartiles", "steps_per_second", "tokens_per_second", "padded_share"):
        assert report[key] is None, key


@pytest.mark.skipif(MemoryGauge(CPU).kind is None, reason="this system has no resettable resident-set peak")
def test_evaluation_memory_stays_out_of_the_training_peak():
    meter = Meter(CPU, warmup_steps=0)
    meter.start()
    with meter.evaluation():
        block = torch.ones(256 << 20, dtype=torch.uint8)
        del block
    with meter.step(real_tokens=1, padded_tokens=1):
        small = torch.ones(1 << 20, dtype=torch.uint8)
    meter.close_training_window()
    assert meter.report()["peak_memory_bytes"] < 200 << 20
    del small


@pytest.mark.skipif(MemoryGauge(CPU).kind is None, reason="this system has no resettable resident-set peak")
def test_training_memory_is_told_apart():
    model = nn.Linear(512, 512, bias=False)  # 1 MiB of weights
    meter = Meter(CPU, warmup_steps=0)
    optimizer = torch.optim.Adam(model.parameters())
    meter.track(model, optimizer)
    meter.start()
    with meter.step(real_tokens=1, padded_tokens=1):
        block = torch.ones(64 << 20, dtype=torch.uint8)
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        del block
    meter.close_training_window()
    memory, peak = meter.report()["memory"], meter.report()["peak_memory_bytes"]
    assert memory.weights == memory.gradients == 512 * 512 * 4
    assert memory.optimizer == 2 * 512 * 512 * 4 + 4  # two moments and a step number
    assert memory.activations == peak - memory.weights - memory.gradients - memory.optimizer >= 60 << 20
    assert memory.evaluation_peak is None
    assert memory.training_reserved is None


def test_parts_of_a_step_add_up_to_it():
    meter = Meter(CPU, warmup_steps=1)
    for _ in range(3):
        with meter.step(real_tokens=1, padded_tokens=1):
            for _ in range(2):  # two batches
                time.sleep(0.01)
                meter.lap("forward")
                time.sleep(0.02)
                meter.lap("backward")
            time.sleep(0.005)
    report = meter.report()
    seconds, median = report["compute_seconds"], report["compute_ms"]
    assert seconds.forward >= 3 * 0.02
    assert seconds.backward >= 3 * 0.04
    assert seconds.optimizer >= 3 * 0.005
    assert seconds.forward + seconds.backward + seconds.optimizer == pytest.approx(report["seconds"].compute, abs=2e-3)
    assert median.backward >= 40 > median.optimizer


def test_a_step_in_one_piece_has_no_parts():
    meter = Meter(CPU, warmup_steps=0)
    with meter.step(real_tokens=1, padded_tokens=1):
        pass
    report = meter.report()
    assert report["compute_ms"].forward is report["compute_seconds"].optimizer is None


def test_a_failed_step_is_paid_for_but_no_step():
    meter = Meter(CPU, warmup_steps=0)

    def fail():
        with meter.step(real_tokens=7, padded_tokens=7, shapes=[(1, 7)]):
            meter.lap("forward")
            time.sleep(0.02)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    with meter.step(real_tokens=5, padded_tokens=10, shapes=[(2, 5)]):
        pass
    report = meter.report()
    assert report["seconds"].compute >= 0.02
    assert report["steps"] == 1
    assert report["step_ms"] < 20
    assert dict(meter.shapes) == {(2, 5): 1}
    assert meter.real_tokens == 5
    assert report["padded_tokens_per_second"] == pytest.approx(2 * report["tokens_per_second"])


def test_a_failed_evaluation_leaves_its_memory_out_of_training(monkeypatch):
    meter = Meter(CPU, warmup_steps=0)
    reads = []
    monkeypatch.setattr(meter.memory, "reset", lambda: reads.append("reset"))

    def fail():
        with meter.evaluation():
            reads.clear()
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert reads == ["reset"]


def test_a_resumed_run_goes_on_where_it_was_and_warms_up_again():
    first = Meter(CPU, warmup_steps=1)
    first.start()
    for tokens in (3, 4, 5):
        with first.account("data"):
            time.sleep(0.002)
        with first.step(real_tokens=tokens, padded_tokens=8, shapes=[(1, 8)]):
            first.lap("forward")
            time.sleep(0.005)
            first.lap("backward")
    buffer = io.BytesIO()
    torch.save(first.state(), buffer)
    buffer.seek(0)
    second = Meter(CPU, warmup_steps=1)
    second.restore(torch.load(buffer, weights_only=True))
    assert second.train_seconds == first.train_seconds
    assert second.real_tokens == 12
    same = first.report()
    for key, value in second.report().items():
        if key != "memory_kind":
            assert value == same[key], key
    for seconds in (0.1, 0.005):
        with second.step(real_tokens=6, padded_tokens=8, shapes=[(1, 8)]):
            time.sleep(seconds)
    report = second.report()
    assert report["steps"] == 5
    assert report["warmup_steps_dropped"] == 2
    assert report["step_ms"] < 100
    assert dict(second.shapes) == {(1, 8): 3}
    assert second.timed_steps == 3


def test_medians_are_of_the_timed_steps():
    meter = Meter(CPU, warmup_steps=1)
    clock = iter([0, 100, 100, 101, 101, 103, 103, 106, 106, 110])
    meter._clock = lambda: next(clock)
    meter._laps = type("Laps", (), {"begin": lambda s: 0, "lap": lambda s, n: 0, "seconds": lambda s: {}})()
    for _ in range(5):
        with meter.step(real_tokens=10, padded_tokens=20):
            pass
    report = meter.report()
    assert report["step_ms"] == 1e3 * statistics.median([1, 2, 3, 4])
    assert report["step_ms_quartiles"] == [1750, 3250]  # linear between the neighbours
    assert report["steps_per_second"] == 4 / 10
    assert report["tokens_per_second"] == 40 / 10
    assert report["padded_tokens_per_second"] == 80 / 10
    assert report["seconds"].compute == 110


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parts_on_a_device_are_read_from_its_events():
    device = torch.device("cuda")
    meter = Meter(device, warmup_steps=0)
    x = torch.ones(4096, 4096, device=device)
    meter.start()
    with meter.step(real_tokens=1, padded_tokens=1):
        for _ in range(20):
            x @ x
        meter.lap("forward")
        x @ x
        meter.lap("backward")
    meter.close_training_window()
    report = meter.report()
    parts = report["compute_seconds"]
    assert parts.forward > 5 * parts.backward
    assert parts.forward + parts.backward + parts.optimizer == pytest.approx(report["seconds"].compute, rel=0.2)
    assert report["memory"].training_device >= report["memory"].training_reserved >= report["peak_memory_bytes"]
