"""The WKV-4 op against golden vectors, its definition and itself, for every kernel."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attention.kernels import dispatch
from attention.kernels.wkv4 import wkv4
from tests.attention import cases
from tests.attention.wkv4_reference import error, golden, wkv4_by_definition

KERNELS = dispatch.available("wkv4", "cpu")
GOLDEN = ["a", "b_holes", "c_overflow100", "d_ramp", "e_n4096", "f_extreme_decay"]
NAMES = ("time_decay", "u", "k", "v")

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
# the C++ kernel has no float64, which finite differences need
each_plain_kernel = pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "cpp"])
both_ways = pytest.mark.parametrize(
    ("kernel", "bidirectional"),
    [(name, way) for name in KERNELS for way in (False, True)],
)


def random_inputs(batch, length, channels, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    decay = torch.linspace(-6, 2, channels, dtype=dtype)
    return decay, normal(channels), normal(batch, length, channels), normal(batch, length, channels)


def gradients(inputs, gy, **options):
    inputs = [x.clone().requires_grad_() for x in inputs]
    y, _ = wkv4(*inputs, **options)
    return y.detach(), torch.autograd.grad((y * gy).sum(), inputs)


@each_kernel
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_forward_state_and_gradients(name, kernel):
    want = golden(f"wkv4_{name}")
    inputs = [want[key].clone().requires_grad_() for key in NAMES]
    y, (num, den, peak) = wkv4(*inputs, kernel=kernel)
    assert error(y, want["y"]) < 5e-5
    factor = torch.exp(peak.double() - want["state_max"])
    assert error(num * factor, want["state_num"]) < 5e-5
    assert error(den * factor, want["state_den"]) < 5e-5
    (y * want["gy"]).sum().backward()
    for key, x in zip(NAMES, inputs):
        assert error(x.grad, want[f"g_{key}"]) < 3e-4, key


@each_kernel
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_in_bfloat16(name, kernel):
    want = golden(f"wkv4_{name}")
    inputs = [want[key].bfloat16() if key in "kv" else want[key].clone() for key in NAMES]
    inputs = [x.requires_grad_() for x in inputs]
    y, state = wkv4(*inputs, kernel=kernel)
    assert y.dtype == torch.bfloat16
    assert all(part.dtype == torch.float32 for part in state)
    assert error(y, want["y"]) < 1e-2
    (y * want["gy"]).sum().backward()
    for key, x in zip(NAMES, inputs):
        assert error(x.grad, want[f"g_{key}"]) < 2e-2, key


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["a", "b_holes", "c_overflow100", "d_ramp", "f_extreme_decay"])
def test_golden_bidirectional(name, dtype, kernel):
    want = golden(f"wkv4_{name}")
    inputs = [want[key].to(dtype) if key in "kv" else want[key] for key in NAMES]
    y, state = wkv4(*inputs, bidirectional=True, kernel=kernel)
    assert state is None
    assert y.dtype == dtype
    assert error(y, want["y_bidir"]) < (5e-5 if dtype == torch.float32 else 1e-2)


@each_kernel
@pytest.mark.parametrize("name", ["a", "b_holes"])
def test_golden_mask(name, kernel):
    want = golden(f"wkv4_{name}")
    y, _ = wkv4(*(want[key] for key in NAMES), key_mask=want["key_mask"], kernel=kernel)
    assert error(y, want["y_mask"]) < 5e-5


@both_ways
@pytest.mark.parametrize("length", [1, 2, 63, 100, 257])
def test_definition_at_odd_lengths(length, bidirectional, kernel):
    inputs = random_inputs(2, length, 5, seed=length)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"bidirectional": bidirectional}
    y, _ = wkv4(*inputs, kernel=kernel, **options)
    assert error(y, wkv4_by_definition(*inputs, **options)) < 5e-6
    y, _ = wkv4(*inputs, key_mask=mask, kernel=kernel, **options)
    want = wkv4_by_definition(*inputs, key_mask=mask, **options)
    assert (y - want).abs().max() < 5e-6 * max(1, want.abs().max())


def test_definition_at_length_4097():
    inputs = random_inputs(1, 4097, 1)
    want = wkv4_by_definition(*inputs)
    for kernel in KERNELS:
        y, _ = wkv4(*inputs, kernel=kernel)
        assert error(y, want) < 5e-5


@each_plain_kernel
@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])
def test_gradients_of_the_definition(bidirectional, kernel):
    inputs = random_inputs(2, 63, 4, dtype=torch.float64)
    gy = torch.randn(2, 63, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    _, got = gradients(inputs, gy, bidirectional=bidirectional, kernel=kernel)
    inputs = [x.requires_grad_() for x in inputs]
    y = wkv4_by_definition(*inputs, bidirectional=bidirectional)
    for key, x, want in zip(NAMES, got, torch.autograd.grad((y * gy).sum(), inputs)):
        assert error(x, want) < 1e-10, key


@each_plain_kernel
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("mode", ["causal", "bidirectional", "mask", "state"])
def test_gradcheck(mode, length, kernel):
    inputs = [x.requires_grad_() for x in random_inputs(2, length, 3, dtype=torch.float64)]
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, length, generator=generator) < 0.6
    extra = []
    if mode == "state":
        num = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        extra = [num.requires_grad_(), torch.full_like(num, 0.7).requires_grad_()]

    def run(*args):
        options = {"bidirectional": mode == "bidirectional", "kernel": kernel}
        if mode == "mask":
            return wkv4(*args, key_mask=mask, **options)[0][mask]
        if mode != "state":
            return wkv4(*args, **options)[0]
        peak = torch.full_like(args[4], 0.5)
        y, (num, den, end_peak) = wkv4(*args[:4], state=(args[4], args[5], peak), **options)
        factor = end_peak.detach().exp()
        return y, num * factor, den * factor

    assert torch.autograd.gradcheck(run, (*inputs, *extra))


@both_ways
@pytest.mark.parametrize("poison", [torch.nan, 1e4])
def test_masked_positions_do_not_leak(poison, bidirectional, kernel):
    decay, u, k, v = random_inputs(3, 40, 4)
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[1, 25:] = False
    mask[2] = False
    gy = torch.randn(3, 40, 4, generator=torch.Generator().manual_seed(5))
    options = {"key_mask": mask, "bidirectional": bidirectional, "kernel": kernel}
    y, grads = gradients((decay, u, k, v), gy, **options)
    hidden = ~mask[..., None]
    k, v = k.masked_fill(hidden, poison), v.masked_fill(hidden, poison)
    y_poisoned, grads_poisoned = gradients((decay, u, k, v), gy, **options)
    assert torch.equal(y, y_poisoned)
    assert all(torch.equal(*pair) for pair in zip(grads, grads_poisoned))
    assert (y[2] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[2][~mask] == 0).all()
    assert (grads[3][~mask] == 0).all()


@each_kernel
def test_keys_too_far_apart_for_float64(kernel):
    decay, u, k, v = random_inputs(1, 30, 4)
    inputs = (decay, u, 500 * k, v)
    y, _ = wkv4(*inputs, kernel=kernel)
    assert error(y, wkv4_by_definition(*inputs)) < 5e-5


@each_kernel
@pytest.mark.parametrize("low", [-20.0, -100.0])
def test_a_large_key_is_not_forgotten_while_it_outweighs_the_rest(low, kernel):
    # e^{90 - 0.9 t} is less than fp32 holds beside e^90 long before it is less than e^low
    k = torch.full((1, 220, 1), low)
    k[:, 0] = 90.0
    inputs = (torch.tensor([-0.1]), torch.zeros(1), k, torch.linspace(-1, 1, 220).view(1, 220, 1))
    y, grads = gradients(inputs, torch.ones_like(k), kernel=kernel)
    leaves = [x.double().requires_grad_() for x in inputs]
    want = wkv4_by_definition(*leaves)
    assert error(y, want) < 5e-5
    for key, got, expected in zip(NAMES, grads, torch.autograd.grad(want.sum(), leaves)):
        assert (got - expected).abs().max() < 3e-4 * expected.abs().max().clamp(min=10), key


@both_ways
@pytest.mark.parametrize("speed", [-0.1, 1.0, 5.0])
def test_masked_queries_after_a_long_gap_see_what_was_before_it(speed, bidirectional, kernel):
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, 250, 3, generator=generator) for _ in "kv")
    inputs = (torch.full((3,), speed), torch.zeros(3), k, v)
    # the gaps end within a tile, so that its first rows are hidden and its last are not
    mask = torch.ones(1, 250, dtype=torch.bool)
    mask[:, 5:55] = mask[:, 70:245] = False
    y, _ = wkv4(*inputs, key_mask=mask, bidirectional=bidirectional, kernel=kernel)
    assert error(y, wkv4_by_definition(*inputs, key_mask=mask, bidirectional=bidirectional)) < 5e-5


@each_kernel
@pytest.mark.parametrize("hidden", [1, 19, 40])
def test_the_end_state_holds_what_decayed_far(hidden, kernel):
    """One visible key, then masked ones at e^-148 a step: the state is (v, 1) e^{k + hidden w}."""
    length = hidden + 1
    k, v = torch.full((1, length, 1), 0.25), torch.full((1, length, 1), -1.5)
    decay = torch.tensor([5.0])
    leaves = [x.requires_grad_() for x in (decay, torch.zeros(1), k, v)]
    mask = torch.arange(length)[None] == 0
    _, (num, den, peak) = wkv4(*leaves, key_mask=mask, kernel=kernel)
    # float32 holds an exponent of thousands to 3e-4
    assert abs(den.log() + peak - (0.25 - hidden * decay.exp())).item() < 2e-3
    assert error(num / den, torch.tensor([[-1.5]])) < 1e-6
    grads = torch.autograd.grad((num / den.detach()).sum(), leaves, allow_unused=True, materialize_grads=True)
    wanted = (1.5 * hidden * decay.exp(), torch.zeros(1), -1.5 * mask[..., None], 1.0 * mask[..., None])
    for key, got, want in zip(NAMES, grads, wanted):
        assert (got - want).abs().max() < 1e-5 * want.abs().max().clamp(min=1), key


@each_kernel
def test_the_end_state_holds_a_small_key_after_a_large_one(kernel):
    # only the last key is left after a step of e^-148
    k, v = torch.tensor([90.0, -100.0]).view(1, 2, 1), torch.tensor([1.0, -2.0]).view(1, 2, 1)
    for state in (None, (torch.ones(1, 1), torch.ones(1, 1), torch.full((1, 1), 90.0))):
        _, (num, den, peak) = wkv4(torch.tensor([5.0]), torch.zeros(1), k, v, state=state, kernel=kernel)
        # 90 - e^5 = -58.4 outweighs -100 still
        assert abs(den.log() + peak - (90 - torch.tensor(5.0).exp())).item() < 1e-4
        assert error(num / den, torch.ones(1, 1)) < 1e-6


@both_ways
def test_activation_checkpointing_changes_no_gradient(bidirectional, kernel):
    leaves = [x.requires_grad_() for x in random_inputs(2, 20, 3)]

    def run(*inputs):
        return wkv4(*inputs, bidirectional=bidirectional, kernel=kernel)[0]

    want = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    got = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(map(torch.equal, got, want))


@each_kernel
def test_a_diverged_key_shows(kernel):
    decay, u, k, v = random_inputs(1, 30, 4)
    k[0, 10] = torch.nan
    assert wkv4(decay, u, k, v, kernel=kernel)[0][0, 10:].isnan().all()


@each_kernel
def test_chunks_equal_one_call(kernel):
    decay, u, k, v = (x.requires_grad_() for x in random_inputs(2, 150, 4))
    # an early large key must not cost the later ones their precision
    k_spike = k + 60 * (torch.arange(150) == 3)[None, :, None]
    whole, (num, den, peak) = wkv4(decay, u, k_spike, v, kernel=kernel)
    state, parts = None, []
    for part in (slice(0, 1), slice(1, 64), slice(64, 150)):
        y, state = wkv4(decay, u, k_spike[:, part], v[:, part], state=state, kernel=kernel)
        parts.append(y)
    streamed = torch.cat(parts, 1)
    assert error(streamed, whole) < 5e-6
    factor = torch.exp(state[2] - peak)
    assert error(state[0] * factor, num) < 5e-6
    assert error(state[1] * factor, den) < 5e-6
    gy = torch.randn(whole.shape, generator=torch.Generator().manual_seed(6))
    leaves = (decay, u, k, v)
    want = torch.autograd.grad((whole * gy).sum(), leaves)
    for key, x, y in zip(NAMES, torch.autograd.grad((streamed * gy).sum(), leaves), want):
        assert error(x, y) < 2e-5, key


@each_kernel
def test_reverse_is_the_flipped_scan(kernel):
    decay, u, k, v = random_inputs(2, 37, 4)
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(4)) < 0.7
    gy = torch.randn(2, 37, 4, generator=torch.Generator().manual_seed(5))
    y, grads = gradients((decay, u, k, v), gy, key_mask=mask, reverse=True, kernel=kernel)
    flipped = (decay, u, k.flip(1), v.flip(1))
    want, want_grads = gradients(flipped, gy.flip(1), key_mask=mask.flip(1), kernel=kernel)
    assert torch.equal(y.flip(1), want)
    want_grads = want_grads[:2] + tuple(grad.flip(1) for grad in want_grads[2:])
    for key, got, grad in zip(NAMES, grads, want_grads):
        assert torch.equal(got, grad), key


@each_kernel
def test_state_may_change_kernel(kernel):
    decay, u, k, v = random_inputs(2, 50, 4)
    whole, _ = wkv4(decay, u, k, v, kernel=kernel)
    _, state = wkv4(decay, u, k[:, :20], v[:, :20], kernel="reference")
    rest, _ = wkv4(decay, u, k[:, 20:], v[:, 20:], state=state, kernel=kernel)
    assert error(rest, whole[:, 20:]) < 5e-6


def test_available_and_last_used():
    inputs = random_inputs(1, 4, 2)
    wkv4(*inputs)
    assert dispatch.last_used("wkv4") == KERNELS[0]
    assert KERNELS[-2:] == ["torch", "reference"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(2, 5, 4)}, "one shape"),
        ({"k": torch.zeros(2, 6, 4).cfloat()}, "k must be of a floating point dtype; got torch.complex64; give"),
        ({"u": torch.zeros(3)}, r"time_decay and u must be of shape \(4,\)"),
        ({"k": torch.zeros(2, 0, 4), "v": torch.zeros(2, 0, 4)}, "L, C > 0"),
        ({"v": torch.zeros(2, 6, 4, dtype=torch.int64)}, "v must be of a floating point dtype; got torch.int64; give"),
        ({"v": torch.zeros(2, 6, 4, dtype=torch.bfloat16)}, "share a dtype; got torch.float32 and torch.bfloat16"),
        ({"v": torch.zeros(2, 6, 4, device="meta")}, "k is on cpu, v on meta; give"),
        ({"state": [torch.zeros(2, 4)] * 2}, r"three tensors \(num, den, max\)"),
        ({"key_mask": torch.ones(2, 6)}, "must be bool"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool)}, "must be bool"),
        ({"state": [torch.zeros(2, 4)] * 3, "bidirectional": True}, "takes no state"),
        ({"state": [torch.zeros(1, 4)] * 3}, "three tensors of shape"),
        ({"kernel": "fast"}, "unknown for wkv4"),
    ],
)
def test_errors_say_what_to_change(change, message):
    arguments = dict(zip(NAMES, random_inputs(2, 6, 4))) | change
    with pytest.raises(ValueError, match=message) as error:
        wkv4(**arguments)
    cases.assert_remedy(error.value)


@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ["ramp down", "large"])
def test_gradients_in_half_precision_hold_where_keys_are_large(kernel, bidirectional, dtype, shape):
    decay, u, k, v = random_inputs(2, 17, 6)
    k = torch.linspace(100, -100, 17)[None, :, None] + 0 * k if shape == "ramp down" else 100 * torch.tanh(k)
    inputs = (decay, u, k.to(dtype), v.to(dtype))
    gy = torch.randn(2, 17, 6, generator=torch.Generator().manual_seed(3)).to(dtype)
    leaves = [x.double().requires_grad_() for x in inputs]
    want = torch.autograd.grad((wkv4_by_definition(*leaves, bidirectional=bidirectional) * gy).sum(), leaves)
    for key, got, exact in zip(NAMES, gradients(inputs, gy, bidirectional=bidirectional, kernel=kernel)[1], want):
        # 2e-2 of the golden vectors, of a gradient that is not nearly zero
        assert (got - exact).abs().max() < 2e-2 * exact.abs().max().clamp_min(0.05), key
