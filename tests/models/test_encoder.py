"""The encoder: padding never matters, pooling uses true lengths, bad shapes are named."""

import subprocess
import sys

import pytest
import torch

import attention
from attention.base import MixerConfig
from models import EncoderConfig, build_model
from models.encoder import Encoder, not_kept, sinusoids

WIDTH, VOCABULARY, LENGTH = 16, 11, 24


def mixer_config(name: str, **values: object) -> MixerConfig:
    config = attention.load(name).Config(name=name, **values)
    if hasattr(config, "num_heads"):
        config.num_heads = 2
    return config


def encoder_config(**values: object) -> EncoderConfig:
    return EncoderConfig(**{"num_layers": 2, "width": WIDTH, "num_heads": 2, "ffn_width": 32, "dropout": 0.0, **values})


def model(name: str, **values: object) -> torch.nn.Module:
    torch.manual_seed(0)
    net = build_model(encoder_config(**values), mixer_config(name), vocab_size=VOCABULARY, num_classes=3, length=LENGTH)
    with torch.no_grad():  # RWKV starts with zero projections, which would hide everything
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net.eval()


def padded(rows: list[list[int]], length: int, filler: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full((len(rows), length), filler)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return tokens, mask


ROWS = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 1, 2, 3, 4, 5, 6, 7], [3]]


@pytest.mark.parametrize("name", list(attention.REGISTRY))
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("block", ["uniform", "native"])
def test_logits_do_not_depend_on_padding(name, pooling, block):
    net = model(name, pooling=pooling, block=block)
    alone = torch.cat([net(*padded([row], len(row))) for row in ROWS])
    together = net(*padded(ROWS, 11))
    garbage = net(*padded(ROWS, LENGTH, filler=9))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(garbage, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_gradients_do_not_depend_on_padding(name):
    def gradients(tokens: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        net = model(name)
        net(tokens, mask).square().sum().backward()
        return [p.grad for n, p in net.named_parameters() if "positions" not in n and "embedding" not in n]

    for short, long in zip(gradients(*padded(ROWS, 11)), gradients(*padded(ROWS, LENGTH, filler=9))):
        torch.testing.assert_close(long, short, rtol=1e-3, atol=1e-4)


def test_a_row_of_only_padding_is_finite():
    tokens, mask = padded([[], [1, 2]], 4)
    for name in attention.REGISTRY:
        assert torch.isfinite(model(name)(tokens, mask)).all(), name


def test_mean_pooling_divides_by_the_true_length():
    net = Encoder(encoder_config(), mixer_config("linear"), vocab_size=VOCABULARY, length=LENGTH)
    x = torch.randn(1, 4, WIDTH)
    mask = torch.tensor([[True, True, True, False]])
    torch.testing.assert_close(net._pool(x, mask)[0], x[0, :3].mean(0))


def test_last_pooling_takes_the_last_real_token():
    net = Encoder(encoder_config(pooling="last"), mixer_config("linear"), vocab_size=VOCABULARY, length=LENGTH)
    x = torch.randn(2, 4, WIDTH)
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    torch.testing.assert_close(net._pool(x, mask), torch.stack((x[0, 1], x[1, 3])))


def test_sinusoids_follow_the_formula():
    table = sinusoids(50, 7)
    assert table.shape == (50, 7)
    for position, channel in ((0, 0), (3, 2), (49, 4)):
        angle = torch.tensor(position / 10_000 ** (channel / 7))
        torch.testing.assert_close(table[position, channel], torch.sin(angle))
        torch.testing.assert_close(table[position, channel + 1], torch.cos(angle))


def test_positions_matter_unless_they_are_none():
    reverse = [list(reversed(ROWS[1]))]
    for positions, differs in (("learned", True), ("sinusoidal", True), ("none", False)):
        net = model("softmax", positions=positions)
        same = torch.allclose(net(*padded([ROWS[1]], 11)), net(*padded(reverse, 11)), atol=1e-4)
        assert same is not differs, positions


def test_rows_beyond_the_length_are_refused():
    with pytest.raises(ValueError, match="exceeds the model's 24; raise task.length"):
        model("linear")(*padded([[1] * 25], 25))


def test_cls_needs_both_directions():
    with pytest.raises(ValueError, match="pooling=cls"):
        build_model(
            encoder_config(pooling="cls"),
            mixer_config("linear", causal=True),
            vocab_size=VOCABULARY,
            num_classes=3,
            length=LENGTH,
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", 0),
        ("width", 0),
        ("dropout", 1.0),
        ("pooling", "max"),
        ("positions", "rotary"),
        ("block", "x"),
    ],
)
def test_bad_values_name_their_key(key, value):
    with pytest.raises(ValueError, match=f"model.{key}="):
        encoder_config(**{key: value}).validate()


@pytest.mark.parametrize("width", [64, 4096])
def test_a_block_that_is_not_kept_disturbs_no_generator(width):
    before = torch.get_rng_state()
    with not_kept(EncoderConfig(width=width)):
        built = torch.nn.Linear(width, width)
    assert torch.equal(torch.get_rng_state(), before)
    assert built.weight.is_meta == (width == 4096)


def test_checking_a_configuration_does_not_import_the_compiler():
    program = "import sys; from lra.config import compose_run; compose_run([]); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
