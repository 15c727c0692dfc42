"""The RWKV-4 time-mix and channel-mix layers."""

import pytest
import torch
from torch import nn

import attention
from attention.rwkv4 import RWKV4, ChannelMix4, RWKV4Config
from tests.attention.wkv4_reference import error, golden

BOTH = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def mixer(causal, width=16, layer=1, num_layers=3):
    """A mixer away from its zero start."""
    torch.manual_seed(0)
    built = RWKV4(RWKV4Config(causal=causal), width, layer=layer, num_layers=num_layers)
    return randomise(built)


def randomise(module):
    for parameter in module.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return module


def both_blocks(causal):
    built = mixer(causal)
    return [built, randomise(built.native_channel_mixer())]


def test_golden_time_mix():
    want = golden("rwkv4_layers")
    built = RWKV4(RWKV4Config(causal=True), 16)
    ahead = built.forwards
    given = {
        ahead.mix_key: "mix_k", ahead.mix_value: "mix_v", ahead.mix_gate: "mix_r", ahead.key.weight: "Wk",
        ahead.value.weight: "Wv", ahead.gate.weight: "Wr", built.output.weight: "Wo",
        ahead.time_decay: "time_decay", ahead.bonus: "u",
    }  # fmt: skip
    for parameter, name in given.items():
        parameter.data.copy_(want[f"tm_{name}"])
    assert error(built(want["x"]), want["time_mix_out"]) < 5e-6
    assert error(built.bfloat16()(want["x"].bfloat16()), want["time_mix_out"]) < 2e-2


def test_golden_channel_mix():
    want = golden("rwkv4_layers")
    built = ChannelMix4(16, layer=0, num_layers=1, causal=True)
    given = {
        built.mix_key: "mix_k", built.mix_gate: "mix_r", built.key.weight: "Wk", built.gate.weight: "Wr",
        built.value.weight: "Wv",
    }  # fmt: skip
    for parameter, name in given.items():
        parameter.data.copy_(want[f"cm_{name}"])
    assert error(built(want["x"]), want["channel_mix_out"]) < 5e-6


@BOTH
def test_initial_values(causal):
    built = RWKV4(RWKV4Config(causal=causal), 12, layer=2, num_layers=3)
    ahead = built.forwards
    channels = 12 if causal else 6
    h = torch.arange(channels)
    torch.testing.assert_close(ahead.time_decay.data, -5 + 8 * (h / (channels - 1)) ** 2.0)
    torch.testing.assert_close(ahead.bonus.data[:3].exp(), 0.3 * torch.tensor([0.0, 0.5, -0.5]).exp())
    mix = (torch.arange(12) / 12) ** (1 / 3)
    torch.testing.assert_close(ahead.mix_key.data, mix)
    torch.testing.assert_close(ahead.mix_value.data, mix + 0.3)
    torch.testing.assert_close(ahead.mix_gate.data, (torch.arange(12) / 12) ** (1 / 6))
    x = torch.randn(2, 5, 12)
    assert (built(x) == 0).all()
    assert (built.native_channel_mixer()(x) == 0).all()


@pytest.mark.parametrize(("width", "layer", "num_layers"), [(1, 0, 1), (2, 0, 1), (4, 0, 1), (4, 3, 4)])
def test_initial_values_are_finite(width, layer, num_layers):
    for causal in (True, False) if width > 1 else (True,):
        built = RWKV4(RWKV4Config(causal=causal), width, layer=layer, num_layers=num_layers)
        blocks = [built, built.native_channel_mixer()]
        assert all(p.isfinite().all() for block in blocks for p in block.parameters())


@BOTH
def test_it_learns_from_the_zero_start(causal):
    torch.manual_seed(0)
    built = attention.build(RWKV4Config(causal=causal), 8)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    x, target = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    for _ in range(3):
        optimizer.zero_grad()
        (built(x) - target).square().sum().backward()
        optimizer.step()
    assert all((p.grad != 0).any() for p in built.parameters())


@BOTH
def test_parameter_count(causal):
    count = sum(p.numel() for p in mixer(causal, width=16).parameters())
    assert count == 4 * 16**2 + (5 if causal else 8) * 16


@BOTH
@pytest.mark.parametrize("poison", [torch.nan, 1e4])
def test_padding_changes_nothing(poison, causal):
    torch.manual_seed(1)
    x = torch.randn(4, 33, 16)
    mask = torch.ones(4, 33, dtype=torch.bool)
    mask[1, 20:] = False
    mask[2, :7] = False
    mask[3] = torch.rand(33) < 0.6
    hidden = ~mask[..., None]
    for block in both_blocks(causal):
        outputs, grads = [], []
        for fill in (0, poison):
            filled = x.masked_fill(hidden, fill).requires_grad_()
            y = block(filled, mask)
            assert y.isfinite().all()
            outputs.append(y[mask])
            grads.append(torch.autograd.grad(y[mask].square().sum(), [filled, *block.parameters()]))
        assert torch.equal(*outputs)
        assert all(torch.equal(*pair) for pair in zip(*grads))
        assert (grads[0][0][~mask] == 0).all()
        for row, real in ((1, slice(0, 20)), (2, slice(7, 33))):
            alone = block(x[row : row + 1, real])
            padded = block(x.masked_fill(hidden, poison), mask)[row : row + 1, real]
            torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


def test_a_row_without_tokens_is_finite():
    mask = torch.tensor([[True, True], [False, False]])
    for causal in (True, False):
        for block in both_blocks(causal):
            x = torch.full((2, 2, 16), torch.nan).masked_fill(mask[..., None], 1).requires_grad_()
            y = block(x, mask)
            y.sum().backward()
            assert y.isfinite().all()
            assert all(p.grad.isfinite().all() for p in block.parameters())


def test_causal_sees_no_future_and_bidirectional_does():
    x = torch.randn(1, 21, 16, generator=torch.Generator().manual_seed(2))
    changed = x.clone()
    changed[:, 12] += 1
    for causal in (True, False):
        for block in both_blocks(causal):
            moved = (block(changed) - block(x)).abs().amax((0, 2)) > 1e-6
            assert moved[12]
            assert moved[:12].any() != causal


def test_the_reversed_direction_mirrors():
    built = mixer(causal=False)
    built.backwards.load_state_dict(built.forwards.state_dict())
    left, right = built.output.weight.data.chunk(2, 1)
    right.copy_(left)
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(built(x.flip(1)), built(x).flip(1), rtol=1e-5, atol=1e-6)


def test_channel_mix_steps_equal_its_causal_forward():
    built = both_blocks(causal=True)[1]
    x = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(4))
    state, outputs = built.init_state(2), []
    for x_t in x.unbind(1):
        y_t, state = built.step(x_t, state)
        outputs.append(y_t)
    torch.testing.assert_close(torch.stack(outputs, 1), built(x), rtol=0, atol=1e-5)
    assert state.shape == (2, 16)


def test_bidirectional_refuses_to_stream():
    built = mixer(causal=False)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        built.init_state(1)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        built.step(torch.zeros(1, 16), None)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        built.native_channel_mixer().step(torch.zeros(1, 16), torch.zeros(1, 16))
    with pytest.raises(ValueError, match=r"model\.width=15"):
        RWKV4(RWKV4Config(), 15)


@BOTH
def test_bfloat16_autocast_trains(causal):
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(5))
    for block in both_blocks(causal):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x.bfloat16())
        y.float().square().sum().backward()
        assert error(y.detach(), block(x).detach()) < 3e-2
        assert all(p.grad.isfinite().all() for p in block.parameters())
