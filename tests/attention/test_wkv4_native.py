"""What only the C++ WKV-4 kernel promises: gradients of a state, determinism, every width and dtype."""

import pytest
import torch

from attention.kernels import dispatch
from attention.kernels.wkv4 import wkv4
from tests.attention.test_wkv4 import NAMES, gradients, random_inputs
from tests.attention.wkv4_reference import error, wkv4_by_definition

both_ways = pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
pytestmark = pytest.mark.skipif("cpp" not in dispatch.available("wkv4", "cpu"), reason="no native kernel here")


def with_state(inputs, kernel, *, key_mask=None, dtype=torch.float32):
    """Gradients by all inputs and the start state of a loss over y and the end state."""
    generator = torch.Generator().manual_seed(7)
    channels = inputs[0].shape[0]
    sums = [torch.rand(2, channels, generator=generator) for _ in range(2)]
    leaves = [x.to(dtype).requires_grad_() for x in (*inputs, *sums)]
    start = (*leaves[4:], torch.full_like(leaves[4], 1.3).detach())
    y, (num, den, peak) = wkv4(*leaves[:4], state=start, key_mask=key_mask, kernel=kernel)
    gy = torch.randn(y.shape, generator=generator).to(dtype)
    if key_mask is not None:
        gy = gy * key_mask[..., None]
    loss = (y * gy).sum() + (num / den).cos().sum() + (den.log() + peak).sin().sum()
    return [y.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spread", [1, 40], ids=["near keys", "far keys"])
def test_gradients_through_both_states(spread, masked):
    decay, u, k, v = random_inputs(2, 45, 5, seed=8)
    inputs = (decay, u, spread * k - 2 * spread, v)
    mask = torch.rand(2, 45, generator=torch.Generator().manual_seed(9)) < 0.6 if masked else None
    want = with_state(inputs, "reference", key_mask=mask, dtype=torch.float64)
    for key, got, x in zip(("y", *NAMES, "num", "den"), with_state(inputs, "cpp", key_mask=mask), want):
        assert error(got, x) < 1e-4, key


@both_ways
@pytest.mark.parametrize("channels", [1, 31, 64, 100, 130, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_width(channels, dtype, bidirectional):
    inputs = random_inputs(2, 35, channels)
    inputs = [x.to(dtype) for x in inputs]
    gy = torch.randn(2, 35, channels, generator=torch.Generator().manual_seed(2)).to(dtype)
    y, grads = gradients(inputs, gy, bidirectional=bidirectional, kernel="cpp")
    want = [x.double() for x in inputs]
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert error(y, wkv4_by_definition(*want, bidirectional=bidirectional)) < tolerance
    want_grads = gradients(want, gy, bidirectional=bidirectional, kernel="torch")[1]
    for key, got, grad in zip(NAMES, grads, want_grads):
        assert got.dtype == dtype
        assert error(got, grad) < 2 * tolerance, key


@both_ways
def test_bitwise_the_same_again_and_with_two_threads(bidirectional):
    inputs = random_inputs(3, 300, 200)
    gy = torch.randn(3, 300, 200, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 1, 2):
            torch.set_num_threads(count)
            y, grads = gradients(inputs, gy, bidirectional=bidirectional, kernel="cpp")
            found.append((y, *grads))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for again in found[1:] for pair in zip(found[0], again))


@pytest.mark.parametrize(("length", "channels"), [(4097, 128), (2622, 200)])
def test_results_that_go_past_the_caches(length, channels):
    decay, u, k, v = random_inputs(2, length, channels)
    gy = torch.randn(2, length, channels, generator=torch.Generator().manual_seed(2))
    assert k.numel() >= 2**20 > k[0].numel()  # kPast of wkv4.cpp: a row alone goes through them
    y, grads = gradients((decay, u, k, v), gy, kernel="cpp")
    for row in (slice(0, 1), slice(1, 2)):
        alone, alone_grads = gradients((decay, u, k[row], v[row]), gy[row], kernel="cpp")
        assert torch.equal(y[row], alone)
        assert torch.equal(grads[2][row], alone_grads[2])
        assert torch.equal(grads[3][row], alone_grads[3])


def definition_gradients(inputs, gy, mask):
    """By autograd in float64; no gradient comes from masked queries."""
    leaves = [x.double().requires_grad_() for x in inputs]
    y = wkv4_by_definition(*leaves, key_mask=mask, bidirectional=True)
    if mask is not None:
        gy = gy * mask[..., None]
    return y.detach(), torch.autograd.grad((y * gy).sum(), leaves)


@pytest.mark.parametrize("share", [None, 0.9, 0.5, 0.05], ids=["no mask", "few holes", "holes", "mostly holes"])
@pytest.mark.parametrize("spread", [1, 40], ids=["near keys", "far keys"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 101])
def test_gradients_in_both_directions(length, spread, share):
    decay, u, k, v = random_inputs(2, length, 5, seed=length)
    inputs = (decay, u, spread * k - 2 * spread, v)
    generator = torch.Generator().manual_seed(9)
    mask = None if share is None else torch.rand(2, length, generator=generator) < share
    gy = torch.randn(2, length, 5, generator=generator)
    y, grads = gradients(inputs, gy, key_mask=mask, bidirectional=True, kernel="cpp")
    want, want_grads = definition_gradients(inputs, gy, mask)
    assert (y - want).abs().max() < 1e-5 * want.abs().max().clamp_min(1)
    for key, got, grad in zip(NAMES, grads, want_grads):
        assert (got - grad).abs().max() < 1e-4 * grad.abs().max().clamp_min(1), key


@pytest.mark.parametrize("padded", ["right", "left"])
def test_padding_in_both_directions(padded):
    inputs = random_inputs(2, 90, 4)
    gy = torch.randn(2, 90, 4, generator=torch.Generator().manual_seed(5))
    mask = torch.arange(90) < torch.tensor([70, 23])[:, None]
    mask = mask if padded == "right" else mask.flip(1)
    y, grads = gradients(inputs, gy, key_mask=mask, bidirectional=True, kernel="cpp")
    want, want_grads = definition_gradients(inputs, gy, mask)
    assert error(y, want) < 1e-5
    for key, got, grad in zip(NAMES, grads, want_grads):
        assert error(got, grad) < 1e-4, key


def test_masked_query_in_a_long_gap_sees_the_near_side():
    decay, u, k, v = random_inputs(1, 400, 3)
    decay = torch.tensor([-4.0, 1.0, 5.0])  # e^5 a step: either side is far below the smallest fp32 number
    mask = torch.zeros(1, 400, dtype=torch.bool)
    mask[0, [3, 350]] = True
    y, _ = wkv4(decay, u, k, v, key_mask=mask, bidirectional=True, kernel="cpp")
    assert error(y, wkv4_by_definition(decay, u, k, v, key_mask=mask, bidirectional=True)) < 5e-5
    assert torch.equal(y[0, :170, 2], v[0, 3, 2].expand(170))
    assert torch.equal(y[0, 185:, 2], v[0, 350, 2].expand(215))


def test_far_keys_from_both_sides():
    decay, u, k, v = random_inputs(1, 60, 4)
    y, _ = wkv4(decay, u, 500 * k, v, bidirectional=True, kernel="cpp")
    assert error(y, wkv4_by_definition(decay, u, 500 * k, v, bidirectional=True)) < 5e-5
    k[0, 40] = torch.nan
    assert wkv4(decay, u, k, v, bidirectional=True, kernel="cpp")[0].isnan().all()


def test_long_gap_keeps_what_is_far_away():
    decay, u, k, v = random_inputs(1, 200, 3)
    mask = torch.zeros(1, 200, dtype=torch.bool)
    mask[0, [3, 180]] = True
    k[0, 180] = -900  # the old key still counts, for all its decay
    y, _ = wkv4(decay, u, k, v, key_mask=mask, kernel="cpp")
    assert error(y, wkv4_by_definition(decay, u, k, v, key_mask=mask)) < 5e-5


def test_weightless_keys_are_no_keys():
    decay, u, k, v = random_inputs(2, 40, 3)
    k[:, :20] = -torch.inf
    y, grads = gradients((decay, u, k, v), torch.ones_like(k), kernel="cpp")
    assert (y[:, :20] == 0).all()
    alone, _ = wkv4(decay, u, k[:, 20:], v[:, 20:], kernel="cpp")
    assert error(y[:, 20:], alone) < 1e-6
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(
    ("dtypes", "options", "reason"),
    [
        ((torch.float64, torch.float64), {}, "fp32, bf16 or fp16 and k is torch.float64; use"),
        ((torch.float64, torch.float64), {"bidirectional": True}, "fp32, bf16 or fp16 and k is torch.float64; use"),
    ],
)
def test_what_it_cannot_take_goes_to_torch(dtypes, options, reason):
    decay, u, k, v = random_inputs(1, 4, 2)
    inputs = (decay, u, k.to(dtypes[0]), v.to(dtypes[1]))
    wkv4(*inputs, **options)
    assert dispatch.last_used("wkv4") == "torch"
    with pytest.raises(ValueError, match=reason):
        wkv4(*inputs, kernel="cpp", **options)
