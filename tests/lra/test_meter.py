"""The meter: accounts add up, peaks are peaks, what cannot be measured is None."""

import time

import pytest
import torch

from lra.meter import MemoryGauge, Meter

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
def test_the_peak_sees_freed_memory_and_can_be_reset():
    gauge = MemoryGauge(CPU)
    gauge.reset()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert gauge.peak() >= 60 << 20
    before = gauge.peak()
    gauge.reset()
    small = torch.ones(1 << 20, dtype=torch.uint8)
    assert gauge.peak() <= before
    del small


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


def test_memory_is_none_where_it_cannot_be_measured(monkeypatch):
    monkeypatch.setattr("lra.memory._status_bytes", lambda field: None)
    gauge = MemoryGauge(CPU)
    gauge.reset()
    assert gauge.kind is None
    assert gauge.peak() is None
