"""Peaks are peaks, phases do not hide one another, bytes of tensors count once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lra import memory
from lra.memory import MemoryGauge, Peak, held

CPU = torch.device("cpu")
MEASURABLE = pytest.mark.skipif(MemoryGauge(CPU).kind is None, reason="this system has no resettable resident-set peak")
MIB = 1 << 20


def printed(program: str) -> str:
    """What ``program`` prints in a process of its own, whose malloc nothing has used before."""
    root = Path(__file__).resolve().parents[2]
    return subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True).stdout


@MEASURABLE
def test_the_peak_sees_freed_memory_and_can_be_reset():
    gauge = MemoryGauge(CPU)
    gauge.reset()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    assert gauge.peak() >= 60 * MIB
    before = gauge.peak()
    gauge.reset()
    small = torch.ones(MIB, dtype=torch.uint8)
    assert gauge.peak() <= before
    del small


# Untuned malloc raises the size from which it maps blocks one by one to that of any mapped block that is freed, up to
# 32 MiB; smaller ones then lie in its heap, which keeps what is freed below a block in use.
FREED_BEFORE = """
import torch
from lra.memory import MemoryGauge

mapped = torch.ones(31 << 20, dtype=torch.uint8)
del mapped
blocks = [torch.ones(20 << 20, dtype=torch.uint8) for _ in range(10)]
del blocks[:-1]
gauge = MemoryGauge(torch.device("cpu"))
gauge.reset()
block = torch.ones(64 << 20, dtype=torch.uint8)
print(gauge.peak() >> 20)
"""


@MEASURABLE
@pytest.mark.skipif(not memory.GLIBC, reason="only glibc gives freed memory back when asked")
def test_memory_freed_before_the_gauge_was_made_hides_nothing():
    assert 60 <= int(printed(FREED_BEFORE)) <= 70


def test_memory_is_none_where_it_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(memory, "_status_bytes", lambda field: None)
    gauge = MemoryGauge(CPU)
    gauge.reset()
    gauge.trim()
    assert gauge.kind is None
    assert gauge.read() == Peak(None, None, None)


PHASES = """
import torch
from lra.memory import tune_allocator
from lra.meter import Meter

def use(mebibytes):
    for _ in range(2):
        blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(mebibytes)]
        del blocks

assert tune_allocator() == "glibc tuned for reuse"
meter = Meter(torch.device("cpu"), warmup_steps=0)
use(8)
meter.start()
for training, evaluation in ({phases}):
    with meter.step(real_tokens=1, padded_tokens=1):
        use(training)
    with meter.evaluation():
        use(evaluation)
meter.close_training_window()
print(meter.report()["peak_memory_bytes"] >> 20, meter.report()["memory"].evaluation_peak >> 20)
print(Meter(torch.device("cpu"), warmup_steps=0).memory.kind)
"""


@MEASURABLE
@pytest.mark.skipif(not memory.GLIBC, reason="only glibc's malloc can be tuned")
@pytest.mark.parametrize(
    ("phases", "training", "evaluation"),
    [
        ("(200, 50), (200, 50)", 200, 50),  # the evaluation fits in what training freed
        ("(50, 200), (50, 200)", 50, 200),  # the second training window fits in what evaluation freed
        ("(50, 200), (120, 200)", 120, 200),  # so does the largest training step
    ],
)
def test_phases_do_not_hide_in_memory_that_malloc_kept(phases, training, evaluation):
    peaks, second = printed(PHASES.format(phases=phases)).splitlines()
    found_training, found_evaluation = map(int, peaks.split())
    assert training <= found_training <= training + 25
    assert evaluation <= found_evaluation <= evaluation + 25
    # fragments of the first run remain, so another one in the process cannot be measured
    assert second == "None"


def test_a_peak_keeps_the_larger_and_the_known():
    peak = Peak(used=3, reserved=None, device=5)
    peak.include(Peak(used=2, reserved=4, device=None))
    assert peak == Peak(used=3, reserved=4, device=5)


def test_held_bytes_by_hand():
    layer = nn.Linear(3, 5)  # 15 + 5 numbers
    model = nn.Sequential(layer, nn.BatchNorm1d(5), nn.Linear(5, 5, bias=False), layer)
    frozen = model[2].weight.requires_grad_(False)  # 25 numbers
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    # 20 of the layer that is there twice, 10 + 10 of the norm and an int64, 25 frozen
    assert held(model, optimizer).weights == 4 * (20 + 20 + 25) + 8
    assert held(model, optimizer).gradients == 4 * (20 + 10)
    assert held(model, optimizer).optimizer == 0
    model[1](layer(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    assert held(model, optimizer).optimizer == 4 * (20 + 10)
    assert frozen.grad is None


def test_views_of_one_storage_count_once():
    model = nn.Module()
    model.whole = nn.Parameter(torch.zeros(10))
    model.register_buffer("part", model.whole.detach()[:5])
    assert held(model, None).weights == 40
