"""FLOPs of a step: by hand for every mixer, the same for every kernel, and nothing is touched by counting."""

from collections import Counter

import pytest
import torch
from torch import nn

import attention
from attention import kernels
from lra.config import compose_run
from lra.flops import count, mean_flops, utilisation
from lra.meter import Meter
from models import build_model

D, H, LAYERS, FFN, CLASSES, L = 16, 2, 1, 24, 10, 33
CPU = torch.device("cpu")


def network(name: str, *, documents: int = 1, kernel: str = "auto"):
    config = compose_run(
        [
            "task=listops",
            f"attention={name}",
            f"attention.kernel={kernel}",
            f"model.width={D}",
            f"model.num_heads={H}",
            f"model.num_layers={LAYERS}",
            f"model.ffn_width={FFN}",
        ]
    )
    return build_model(
        config.model, config.attention, vocab_size=17, num_classes=CLASSES, length=200, documents=documents
    )


def by_hand(name: str, model: nn.Module, length: int) -> int:
    """Forward and backward over one row."""
    of_token = sum(m.weight.numel() for m in model.encoder.modules() if isinstance(m, nn.Linear))
    # forward, gradient of the input, gradient of the weight: 2 FLOPs a weight each
    return 6 * of_token * length + of_head(model) + op_flops(name, model, length)


def of_head(model: nn.Module) -> int:
    return 6 * sum(m.weight.numel() for m in model.head.modules() if isinstance(m, nn.Linear))


def op_flops(name: str, model: nn.Module, L: int) -> int:
    """Of the op of all layers; head width E = D / H."""
    width = D // H
    mixer = model.encoder.blocks[0].mixer
    if name in ("softmax", "flash"):
        each = 3 * 4 * H * L**2 * width
    elif name == "linear":
        each = 3 * 4 * H * L * width * (width + 1)
    elif name == "performer":
        rows = len(mixer.projection)
        each = 2 * 4 * H * L * width * rows + 3 * 4 * H * L * rows * (width + 1)
    elif name == "rwkv4":
        each = 3 * 8 * L * D  # two directions of D / 2 channels
    elif name == "rwkv7":
        each = 3 * 10 * L * sum(d.heads * (D // 2 // d.heads) ** 2 for d in (mixer.forwards, mixer.backwards))
    elif name == "mamba":
        each = 3 * 2 * L * 2 * D * (3 * 16 + 1)  # 2 D inner channels of 16 states
    return LAYERS * each


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_a_row_costs_what_its_products_cost(name):
    model = network(name)
    assert count(model, L) == by_hand(name, model, L)


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_the_kernel_does_not_matter(name):
    names = kernels.available(attention.load(name).op, "cpu")
    assert len({count(network(name, kernel=kernel), L) for kernel in names}) == 1
    assert len(names) > 1


def test_a_pair_costs_two_documents():
    one, two = network("linear"), network("linear", documents=2)
    assert count(two, L, documents=2) == 2 * (count(one, L) - of_head(one)) + of_head(two)


def test_counting_leaves_no_trace():
    model = network("performer").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    count(model, L)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    tokens = torch.ones(1, L, dtype=torch.int64)
    model(tokens, tokens.bool()).sum().backward()
    assert kernels.last_used("favor_attention") in kernels.available("favor_attention", "cpu")


def test_the_mean_step_weighs_every_batch():
    model = network("softmax")
    shapes = Counter({(4, length): 1 + length % 3 for length in range(20, 180)})
    exact = sum(times * 4 * by_hand("softmax", model, length) for (_, length), times in shapes.items())
    assert mean_flops(model, shapes, 100) == pytest.approx(exact / 100, rel=1e-9)
    assert mean_flops(model, Counter({(4, L): 6}), 3) == pytest.approx(2 * 4 * by_hand("softmax", model, L))
    assert mean_flops(model, Counter(), 3) is None
    assert mean_flops(model, shapes, 0) is None


def test_utilisation_is_the_share_of_the_peak(monkeypatch):
    monkeypatch.setattr("lra.flops.matmul_peak", lambda device, precision: 1e9)
    model, meter = network("linear"), Meter(CPU, warmup_steps=1)
    for length in (50, L, L):
        with meter.step(real_tokens=L, padded_tokens=L, shapes=[(1, length)]):
            pass
    found = utilisation(model, meter, "fp32")
    assert found["flops_per_step"] == pytest.approx(by_hand("linear", model, L))
    speed = meter.report()["steps_per_second"]
    assert found["model_flops_utilisation"] == pytest.approx(by_hand("linear", model, L) * speed / 1e9)
    monkeypatch.setattr("lra.flops.matmul_peak", lambda device, precision: None)
    assert utilisation(model, meter, "fp32")["model_flops_utilisation"] is None
