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


def test_it_is_measured_once():
    assert peak.matmul_peak(CPU, "fp32") == peak.matmul_peak(CPU, "fp32") > 1e6


def test_it_is_none_where_nothing_can_be_measured(monkeypatch):
    assert peak.matmul_peak(torch.device("meta"), "fp32") is None

    def refuse(device, run):
        raise RuntimeError("not implemented for this dtype")

    monkeypatch.setattr(peak, "timed", refuse)
    assert peak.matmul_peak(CPU, "bf16") is None
