"""The Mamba mixer."""

import math

import pytest
import torch
from torch.nn.functional import conv1d, silu, softplus

from attention.kernels.selective_scan import selective_scan
from attention.mamba import Mamba, MambaConfig
from tests.golden import error

BOTH = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def mixer(causal, width=16, **options):
    torch.manual_seed(0)
    return Mamba(MambaConfig(causal=causal, **options), width)


def tokens(batch, length, width=16, seed=1):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def test_the_published_formula():
    built, x = mixer(True), tokens(2, 40)
    parts = built.forwards
    weight = parts.conv_weight.T[:, None]
    u = silu(conv1d(parts.input(x).transpose(1, 2), weight, parts.conv_bias, padding=3, groups=32)[..., :40])
    u = u.transpose(1, 2)
    selected = parts.select(u)
    dt, B, C = selected[..., :1], selected[..., 1:17], selected[..., 17:]
    y, _ = selective_scan(u, parts.step_size(dt), -parts.A_log.exp(), B, C, parts.D, kernel="reference")
    want = built.output(y * silu(parts.gate(x)))
    assert error(built(x), want) < 5e-6


@BOTH
def test_initial_values(causal):
    parts = mixer(causal).forwards
    channels = 32 if causal else 16
    torch.testing.assert_close(-parts.A_log.exp(), -torch.arange(1.0, 17).expand(channels, 16))
    assert (parts.D == 1).all()
    dt = softplus(parts.step_size.bias)
    assert dt.min() > 0.999e-3
    assert dt.max() < 0.1001
    assert dt.log().std() > 0.5


@BOTH
@pytest.mark.parametrize("width", [16, 40, 64])
def test_parameter_count(width, causal):
    inner, rank = 2 * width, math.ceil(width / 16)
    count = sum(p.numel() for p in mixer(causal, width).parameters())
    assert count == 3 * width * inner + inner * (2 * rank + 3 * 16 + 4 + 3)


@BOTH
@pytest.mark.parametrize("poison", [torch.nan, 1e4])
def test_padding_changes_nothing(poison, causal):
    built, x = mixer(causal), tokens(4, 33)
    mask = torch.ones(4, 33, dtype=torch.bool)
    mask[1, 20:] = False
    mask[2, :7] = False
    mask[3] = torch.rand(33, generator=torch.Generator().manual_seed(2)) < 0.6
    hidden = ~mask[..., None]
    outputs, grads = [], []
    for fill in (0, poison):
        filled = x.masked_fill(hidden, fill).requires_grad_()
        y = built(filled, mask)
        assert y.isfinite().all()
        outputs.append(y[mask])
        grads.append(torch.autograd.grad(y[mask].square().sum(), [filled, *built.parameters()]))
    assert torch.equal(*outputs)
    assert all(torch.equal(*pair) for pair in zip(*grads))
    assert not grads[0][0][~mask].any()
    padded = built(x.masked_fill(hidden, poison), mask)
    for row, real in ((1, slice(0, 20)), (2, slice(7, 33))):
        torch.testing.assert_close(padded[row, real], built(x[row : row + 1, real])[0], rtol=1e-5, atol=1e-6)


@BOTH
def test_a_row_without_tokens_is_finite(causal):
    built, mask = mixer(causal), torch.tensor([[True, True], [False, False]])
    x = torch.full((2, 2, 16), torch.nan).masked_fill(mask[..., None], 1).requires_grad_()
    y = built(x, mask)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in built.parameters())


def test_the_reversed_direction_mirrors():
    built = mixer(causal=False)
    built.backwards.load_state_dict(built.forwards.state_dict())
    left, right = built.output.weight.data.chunk(2, 1)
    right.copy_(left)
    x = tokens(2, 30)
    torch.testing.assert_close(built(x.flip(1)), built(x).flip(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("conv_width", [1, 4])
def test_steps_equal_the_causal_forward(conv_width):
    built, x = mixer(True, conv_width=conv_width), tokens(2, 4096 if conv_width == 4 else 50)
    state, outputs = built.init_state(2), []
    with torch.no_grad():
        for x_t in x.unbind(1):
            y_t, state = built.step(x_t, state)
            outputs.append(y_t)
        torch.testing.assert_close(torch.stack(outputs, 1), built(x), rtol=0, atol=1e-5)
    assert [part.shape for part in state] == [(2, conv_width - 1, 32), (2, 32, 16)]
    assert state[1].dtype == torch.float32


def test_the_state_is_fp32_in_bfloat16():
    built = mixer(True).bfloat16()
    state = built.init_state(2)
    _, (window, h) = built.step(tokens(2, 1)[:, 0].bfloat16(), state)
    assert (window.dtype, h.dtype, state[1].dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_native_block_has_no_feed_forward():
    native = mixer(False).native_channel_mixer()
    assert not native(tokens(2, 3)).any()
    assert not list(native.parameters())


@pytest.mark.parametrize(
    ("options", "width", "message"),
    [
        ({"state_size": 0}, 16, r"attention\.state_size=0"),
        ({"conv_width": 0}, 16, r"attention\.conv_width=0"),
        ({"expand": 0}, 16, r"attention\.expand=0"),
        ({"expand": 1}, 15, r"model\.width=15 is odd"),
    ],
)
def test_options_that_do_not_fit(options, width, message):
    with pytest.raises(ValueError, match=message):
        mixer(False, width, **options)


def test_bidirectional_refuses_to_stream():
    built = mixer(causal=False)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        built.init_state(1)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        built.step(torch.zeros(1, 16), None)
