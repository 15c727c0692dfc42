"""Heads and inputs beyond one label a row: pairs, several outputs, pixels."""

from dataclasses import replace

import pytest
import torch

import attention
from models import build_model
from models.encoder import PixelEmbedding
from models.heads import MatchingHead
from tests.models.test_encoder import LENGTH, VOCABULARY, encoder_config, mixer_config, padded


def build(name: str = "linear", **task: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(
        encoder_config(), mixer_config(name), **{"vocab_size": VOCABULARY, "num_classes": 5, "length": LENGTH, **task}
    ).eval()


@pytest.mark.parametrize(("interaction", "parts"), [("nli", 4), ("none", 2)])
def test_a_pair_is_seen_as_a_b_product_difference(interaction, parts):
    head = MatchingHead(3, 7, 2, interaction)
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 7.0, 11.0])
    seen = []
    head.classify.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert head(torch.stack((a, b, b, a))).shape == (2, 2)
    first = [1.0, 2, 3, 5, 7, 11, 5, 14, 33, -4, -5, -8]
    assert seen[0][0].tolist() == first[: 3 * parts]
    assert seen[0][1, :6].tolist() == [5.0, 7, 11, 1, 2, 3]


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_the_documents_of_a_pair_share_one_encoder_and_do_not_mix(name):
    net = build(name, documents=2)
    tokens, mask = padded([[1, 2, 3], [4, 5, 6, 7], [8], [9, 1]], 4)
    logits = net(tokens, mask)
    assert logits.shape == (2, 5)
    torch.testing.assert_close(net(tokens[2:], mask[2:]), logits[1:], rtol=1e-4, atol=1e-5)
    vectors = net.encoder(tokens, mask)
    torch.testing.assert_close(net.head(vectors), logits)


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_outputs_are_read_at_the_last_real_positions(name):
    net = build(name, outputs=2)
    rows = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    together = net(*padded(rows, 9))
    assert together.shape == (2, 2, 5)
    for i, row in enumerate(rows):
        torch.testing.assert_close(net(*padded([row], len(row)))[0], together[i], rtol=1e-4, atol=1e-5)
    # the hidden vectors of the positions themselves, found without any gathering
    hidden = []
    net.encoder.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    logits = net(*padded(rows, 9))
    for i, row in enumerate(rows):
        torch.testing.assert_close(net.head(hidden[0][i, len(row) - 2 : len(row)]), logits[i], rtol=1e-4, atol=1e-5)


def test_pixels_enter_as_normalised_numbers():
    embed = PixelEmbedding(0.5, 0.25, 3)
    with torch.no_grad():
        embed.project.weight.fill_(2.0)
        embed.project.bias.fill_(1.0)
    # (255 / 255 - 0.5) / 0.25 = 2 and (0 - 0.5) / 0.25 = -2
    assert embed(torch.tensor([[255, 0]])).tolist() == [[[5.0] * 3, [-3.0] * 3]]
    net = build(pixels=(0.5, 0.25), vocab_size=256)
    assert net(*padded([[0, 255, 7], [1]], 4)).shape == (2, 5)
    assert not [n for n, p in net.named_parameters() if p.shape[0] == 256]


@pytest.mark.parametrize("interaction", ["nli", "none"])
@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_the_gradient_reaches_both_documents(name, interaction):
    torch.manual_seed(0)
    config = replace(encoder_config(), interaction=interaction)
    net = build_model(config, mixer_config(name), vocab_size=VOCABULARY, num_classes=2, length=LENGTH, documents=2)
    # of the first pair's label only: nothing may reach the second pair
    tokens, mask = padded([[1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 3]], 4)
    embedded = []
    net.encoder.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = net.eval()(tokens, mask)
    gradient = torch.autograd.grad(torch.nn.functional.cross_entropy(logits[:1], torch.tensor([1])), embedded[0])[0]
    size = gradient.abs().sum(-1)
    assert (size[:2][mask[:2]] > 0).all()
    assert (size[2:] == 0).all()
    assert (size[~mask] == 0).all()


@pytest.mark.parametrize("name", list(attention.REGISTRY))
def test_a_pair_does_not_depend_on_its_padding(name):
    net = build(name, documents=2)
    short = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    alone = net(*padded(short, 6))
    tokens, mask = padded([*short, [*range(1, 10), 1, 2], [5] * 12], 12)
    # what stands at padding is not looked at, in the shorter document of a pair either
    tokens[~mask] = 7
    torch.testing.assert_close(net(tokens, mask)[:1], alone, rtol=1e-4, atol=1e-5)
    # and the order of the documents counts
    assert not torch.allclose(net(*padded(short[::-1], 6)), alone, rtol=1e-3, atol=1e-4)
