"""Declared FLOPs: by hand, and against what torch counts in kernels that are made of matrix products."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import kernels
from attention.kernels import dispatch
from attention.kernels.flops import COSTS, Cost

B, H, L, E, M = 2, 3, 40, 8, 5


def heads(width=E):
    return torch.randn(B, H, L, width, requires_grad=True)


def counted(run) -> tuple[int, int]:
    """FLOPs that torch sees in the forward and in the backward pass."""
    with FlopCounterMode(display=False) as forward:
        out = run()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_every_op_has_a_declared_cost():
    assert set(COSTS) == set(dispatch.ops()), "add the new op to attention/kernels/flops.py"


def test_softmax_by_hand_and_as_torch_counts_it():
    q, k, v = heads(), heads(), heads()
    cost = COSTS["softmax_attention"](q, k, v, causal=False)
    assert cost == Cost(4 * B * H * L**2 * E, 8 * B * H * L**2 * E)
    assert counted(lambda: kernels.softmax_attention(q, k, v, kernel="reference")) == (cost.forward, cost.backward)


def test_causal_softmax_counts_visible_pairs():
    q, k, v = heads(), heads(), heads()
    pairs = sum(1 for i in range(L) for j in range(L) if j <= i)
    assert COSTS["softmax_attention"](q, k, v, causal=True).forward == 4 * B * H * pairs * E


def test_linear_by_hand_and_as_torch_counts_it():
    q, k, v = heads(), heads(), heads()
    cost = COSTS["linear_attention"](q, k, v)
    assert cost.forward == 2 * (2 * B * H * L * E * (E + 1))  # state and readout, a column for the denominator
    assert counted(lambda: kernels.linear_attention(q, k, v, kernel="torch")) == (cost.forward, cost.backward)


def test_favor_against_what_torch_counts():
    q, k, v, projection = heads(), heads(), heads(), torch.randn(M, E)
    cost = COSTS["favor_attention"](q, k, v, projection, features="positive")
    features, sums = 2 * (2 * B * H * L * E * M), 2 * B * H * L * M * (E + 1)
    assert cost == Cost(features + 2 * sums, features + 4 * sums)
    forward, backward = counted(lambda: kernels.favor_attention(q, k, v, projection, kernel="torch"))
    assert forward == cost.forward
    # the kernel makes the features again, and one of its products is in place, which torch's counter overlooks
    assert backward == cost.backward + features - sums


@pytest.mark.parametrize("features", ["hyperbolic", "trig"])
def test_two_features_of_a_row_share_its_projection(features):
    q, k, v, projection = heads(), heads(), heads(), torch.randn(M, E)
    cost = COSTS["favor_attention"](q, k, v, projection, features=features)
    assert cost.forward == 4 * B * H * L * (E * M + 2 * M * (E + 1))


def test_recurrences_count_every_product_that_is_summed():
    # terms of the loop in attention.kernels.wkv4: e^w num, e^k v, e^w den, e^(u + k) v
    k = torch.randn(B, L, E)
    assert COSTS["wkv4"](torch.zeros(E), torch.zeros(E), k, k).forward == 2 * 4 * B * L * E
    # S diag(w), S a, (S a) b^T, v k^T, S r with S (V, K)
    r, v = torch.randn(B, L, H, 4), torch.randn(B, L, H, 6)
    assert COSTS["wkv7"](r, r, r, v, r, r, state=None).forward == 2 * 5 * B * L * H * 4 * 6
    # e^(dt A) h, dt u B, C h with N = 7 states, and D u
    A, states = torch.randn(E, 7), torch.randn(B, L, 7)
    cost = COSTS["selective_scan"](k, k, A, states, states, torch.ones(E), z=None)
    assert cost == Cost(2 * B * L * E * (3 * 7 + 1), 4 * B * L * E * (3 * 7 + 1))


def test_a_stand_in_takes_the_calls_and_goes():
    seen = []
    q = heads()
    with dispatch.replaced(lambda op, *arguments, **options: seen.append((op, arguments[0], options["causal"]))):
        assert kernels.softmax_attention(q, q, q) is None
    assert seen == [("softmax_attention", q, False)]
    assert kernels.softmax_attention(q, q, q).shape == q.shape
