"""The RWKV-7 time-mix and channel-mix layers."""

import pytest
import torch
from torch import nn

import attention
from attention.rwkv7 import RWKV7, ChannelMix7, RWKV7Config
from tests.attention.wkv4_reference import error

BOTH = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def mixer(causal, width=16, num_heads=2, layer=1, num_layers=3):
    """A mixer away from its zero start."""
    torch.manual_seed(0)
    built = RWKV7(RWKV7Config(causal=causal, num_heads=num_heads), width, layer=layer, num_layers=num_layers)
    return randomise(built)


def randomise(module):
    for parameter in module.parameters():
        if parameter.dim() == 2 and not (parameter == parameter[:1, :1]).all():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif not parameter.any():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def both_blocks(causal):
    built = mixer(causal)
    return [built, randomise(built.native_channel_mixer())]


def time_mix_by_loops(built, x):
    """The causal time-mix of one sequence ``x (L, D)``, head by head and step by step, in float64."""
    p = {name: value.double() for name, value in built.state_dict().items()}
    p = {name.removeprefix("forwards."): value for name, value in p.items()}
    x, heads = x.double(), built.forwards.heads
    size = x.shape[1] // heads
    states = torch.zeros(heads, size, size, dtype=torch.float64)
    last, outputs = torch.zeros_like(x[0]), []
    for now in x:
        x_r, x_w, x_k, x_v, x_a, x_g = (now + mix * (last - now) for mix in p["mix"])
        z = p["decay.up.bias"] + p["decay.up.weight"] @ torch.tanh(p["decay.down.weight"] @ x_w)
        decay = torch.exp(-torch.exp(-nn.functional.softplus(-z) - 0.5))
        rate = torch.sigmoid(p["rate.up.bias"] + p["rate.up.weight"] @ (p["rate.down.weight"] @ x_a))
        gate = p["gate.up.weight"] @ torch.sigmoid(p["gate.down.weight"] @ x_g)
        r, k, v = p["receptance.weight"] @ x_r, p["key.weight"] @ x_k, p["value.weight"] @ x_v
        out = torch.zeros_like(now)
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            kappa = k[at] * p["kappa_scale"][at]
            kappa = kappa / kappa.norm()
            key = k[at] * (1 + (rate[at] - 1) * p["rate_scale"][at])
            step = torch.diag(decay[at]) - torch.outer(kappa, kappa * rate[at])
            states[h] = states[h] @ step + torch.outer(v[at], key)
            y = states[h] @ r[at]
            y = (y - y.mean()) / (y.var(correction=0) + 1e-5 * size).sqrt()
            y = y * p["norm.weight"][at] + p["norm.bias"][at]
            out[at] = y + (r[at] * key * p["bonus"][h]).sum() * v[at]
        outputs.append(p["output.weight"] @ (out * gate))
        last = now
    return torch.stack(outputs)


def test_time_mix_by_its_formulas():
    built = mixer(causal=True)
    x = torch.randn(2, 25, 16, generator=torch.Generator().manual_seed(1))
    want = torch.stack([time_mix_by_loops(built, row) for row in x])
    assert error(built(x).detach(), want) < 5e-6


def test_channel_mix_by_its_formula():
    built = randomise(ChannelMix7(16, layer=1, num_layers=3, causal=True))
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
    before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    mixed = x + built.mix * (before - x)
    want = torch.relu(mixed @ built.key.weight.T) ** 2 @ built.value.weight.T
    assert error(built(x).detach(), want.detach()) < 5e-6


@BOTH
def test_initial_values(causal):
    built = RWKV7(RWKV7Config(causal=causal, num_heads=4), 32, layer=2, num_layers=3)
    ahead = built.forwards
    channels = 32 if causal else 16
    n = torch.arange(channels)
    zigzag = (n % 8 - 3.5) / 3.5
    zigzag = zigzag * zigzag.abs()
    decay = -6 + 6 * (n / (channels - 1)) ** 2 + 0.5 + 2.5 * zigzag
    torch.testing.assert_close(ahead.decay.up.bias.data, decay)
    rate = -0.19 + 0.3 * zigzag + 0.4 * (n / (channels - 1) - 0.5)
    torch.testing.assert_close(ahead.rate.up.bias.data, rate)
    powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2]) / 3
    torch.testing.assert_close(ahead.mix.data, 1 - (torch.arange(32) / 32) ** powers[:, None])
    torch.testing.assert_close(ahead.kappa_scale.data, 0.71 - 0.1 * (n / (channels - 1) - 0.5))
    assert ahead.key.weight.abs().max() <= 0.05 * 32**-0.5 < ahead.value.weight.abs().max() <= 0.5 * 32**-0.5
    x = torch.randn(2, 5, 32)
    assert (built(x) == 0).all()
    assert (built.native_channel_mixer()(x) == 0).all()


@pytest.mark.parametrize(("width", "layer", "num_layers"), [(1, 0, 1), (2, 0, 1), (4, 0, 1), (4, 3, 4)])
def test_initial_values_are_finite(width, layer, num_layers):
    for causal in (True, False) if width > 1 else (True,):
        built = RWKV7(RWKV7Config(causal=causal, num_heads=1), width, layer=layer, num_layers=num_layers)
        blocks = [built, built.native_channel_mixer()]
        assert all(p.isfinite().all() for block in blocks for p in block.parameters())
        assert all(block(torch.randn(1, 3, width)).isfinite().all() for block in blocks)


@BOTH
def test_it_learns_from_the_zero_start(causal):
    torch.manual_seed(0)
    built = attention.build(RWKV7Config(causal=causal, num_heads=2), 8)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    x, target = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    for _ in range(3):
        optimizer.zero_grad()
        (built(x) - target).square().sum().backward()
        optimizer.step()
    for name, parameter in built.named_parameters():
        assert (parameter.grad != 0).any(), name


@BOTH
def test_parameter_count(causal):
    width, directions = 64, 1 if causal else 2
    channels = width // directions
    ranks = 16 + 16 + 40 if causal else 8 + 8 + 16
    small = (width + channels) * ranks + 6 * width + 7 * channels
    count = sum(p.numel() for p in mixer(causal, width=width).parameters())
    assert count == 4 * width**2 + directions * small


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


def test_a_hole_leaves_the_state():
    built = mixer(causal=True)
    # without the shift, as the token after a hole sees zeros before it
    built.forwards.mix.data.zero_()
    x = torch.randn(1, 30, 16, generator=torch.Generator().manual_seed(6))
    holed = torch.cat((x[:, :12], torch.full((1, 50, 16), torch.nan), x[:, 12:]), 1)
    mask = torch.ones(1, 80, dtype=torch.bool)
    mask[:, 12:62] = False
    torch.testing.assert_close(built(holed, mask)[mask], built(x)[0], rtol=1e-5, atol=1e-5)


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
            moved = (block(changed) - block(x)).abs().amax((0, 2)) > 1e-5
            assert moved[12]
            assert moved[:12].any() != causal


def test_the_reversed_direction_mirrors():
    built = mixer(causal=False)
    built.backwards.load_state_dict(built.forwards.state_dict())
    left, right = built.output.weight.data.chunk(2, 1)
    right.copy_(left)
    x = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(built(x.flip(1)), built(x).flip(1), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize(("width", "num_heads"), [(15, 1), (18, 3)])
def test_bidirectional_needs_halves(width, num_heads):
    with pytest.raises(ValueError, match=rf"model\.width={width} and of model\.num_heads={num_heads}; make both even"):
        RWKV7(RWKV7Config(num_heads=num_heads), width)
    RWKV7(RWKV7Config(num_heads=num_heads, causal=True), width)


@BOTH
def test_bfloat16_autocast_trains(causal):
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(5))
    for block in both_blocks(causal):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x.bfloat16())
        y.float().square().sum().backward()
        assert error(y.detach(), block(x).detach()) < 3e-2
        assert all(p.grad.isfinite().all() for p in block.parameters())
