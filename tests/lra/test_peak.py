"""The matmul peak: plausible, measured once, None where it cannot be measured."""

import pytest
import torch

from lra import peak

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(peak, "WIDTH", {"cpu": 128})
    monkeypatch.setattr(peak, "SECONDS", 0.01)
    peak.matmul_peak.cache_clear()
    yield
    peak.matmul_peak.cache_clear()


def test_it_counts_two_flops_a_product_in_the_fastest_repeat(monkeypatch):
    seconds = iter([9.0, 0.004, 0.002, 0.008, 0.004, 0.004])  # the first is a warm-up
    monkeypatch.setattr(peak, "timed", lambda device, run: next(seconds))
    assert peak.matmul_peak(CPU, "fp32") == 2 * 128**3 / 0.002


@pytest.mark.parametrize(("rate", "width"), [(1e9, 256), (1e10, 512), (2e11, 1024), (1e15, 1024)])
def test_a_slow_device_gets_a_smaller_product(monkeypatch, rate, width):
    monkeypatch.setattr(peak, "WIDTH", {"cpu": 1024})
    monkeypatch.setattr(peak, "SECONDS", 0.1)
    widths = []

    def measured(device, dtype, width, *, repeats):
        widths.append(width)
        return [2 * width**3 / rate] * repeats

    monkeypatch.setattr(peak, "_products", measured)
    assert peak.matmul_rates(CPU, torch.bfloat16) == pytest.approx([rate] * 5)
    # 1024 takes 8 times as long as 512: 2.1 s at 1 GFLOP/s, 0.2 s at 10, 0.01 s at 200
    assert widths[-1] == width


def test_it_is_measured_once():
    assert peak.matmul_peak(CPU, "fp32") == peak.matmul_peak(CPU, "fp32") > 1e6


def test_it_is_none_where_nothing_can_be_measured(monkeypatch):
    assert peak.matmul_peak(torch.device("meta"), "fp32") is None

    def refuse(device, run):
        raise RuntimeError("not implemented for this dtype")

    monkeypatch.setattr(peak, "timed", refuse)
    assert peak.matmul_peak(CPU, "bf16") is None
