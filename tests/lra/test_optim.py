"""Schedules against their definitions, and which parameters decay."""

import math

import pytest
import torch
from torch import nn

from lra.budget import Budget, Spent
from lra.optim import build_optimizer, learning_rate
from lra.protocol import TrainerConfig


def test_rsqrt_has_the_effective_peak_of_lra():
    config = TrainerConfig(lr=0.05, schedule="rsqrt", warmup=1000, steps=5000)
    # 0.05 / sqrt(1000) = 1.58e-3 at the end of warm-up, half of that at 4 times the step
    assert learning_rate(config, 1000, 0) == pytest.approx(1.5811e-3, rel=1e-4)
    assert learning_rate(config, 4000, 0) == pytest.approx(0.05 / math.sqrt(4000))
    assert learning_rate(config, 500, 0) == pytest.approx(1.5811e-3 / 2, rel=1e-4)


def test_cosine_warms_up_linearly_peaks_once_and_never_reaches_zero_early():
    config = TrainerConfig(lr=1.0, schedule="cosine", warmup=10, steps=110)
    rates = [learning_rate(config, step, Budget(config, 1000).decay(step, Spent())) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * s for s in range(1, 11)])
    assert max(rates) == rates[9] == 1.0
    assert all(a > b for a, b in zip(rates[9:], rates[10:]))
    assert 0 < rates[-1] < 1e-3
    assert rates[59] == pytest.approx(0.5, abs=0.02)  # half-way down


def test_first_step_moves_even_without_warmup():
    for schedule in ("cosine", "rsqrt"):
        assert learning_rate(TrainerConfig(schedule=schedule, warmup=0), 1, 0.0) > 0


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(model, TrainerConfig(weight_decay=0.5, lr=1e-2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 1e-2 * 0.5 if name == "0.weight" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


def test_parameter_groups_are_told(caplog):
    caplog.set_level("INFO")
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))  # 15 weights; 5 biases, 5 + 5 of the norm
    build_optimizer(model, TrainerConfig(lr=0.002, weight_decay=0.1))
    assert caplog.messages == [
        "AdamW, rate 0.002: weight decay 0.1 on 1 matrix (15 numbers), 0 on 3 vectors (15 numbers)"
    ]
