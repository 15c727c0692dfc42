"""The WKV-7 op against golden vectors, its definition and itself, for every kernel."""

from importlib import import_module

import pytest
import torch
from torch.nn.functional import normalize

from attention.kernels import dispatch, wkv7_chunked
from attention.kernels.wkv7 import wkv7
from tests.attention import cases
from tests.attention.wkv4_reference import error, golden

KERNELS = dispatch.available("wkv7", "cpu")
NAMES = ("r", "logw", "k", "v", "a", "b")

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
fast_kernels = pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "reference"])


def random_inputs(length, batch=2, heads=2, keys=8, values=6, dtype=torch.float32, seed=0, decay=1.0):
    """Inputs as the model makes them; ``decay`` is the strongest decay of a step."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width):
        return torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64)

    kappa, rate = normalize(normal(keys), dim=-1), torch.sigmoid(normal(keys))
    logw = -decay * torch.rand(batch, length, heads, keys, generator=generator, dtype=torch.float64)
    parts = (normal(keys), logw, normal(keys), normal(values), -kappa, kappa * rate)
    return [part.to(dtype) for part in parts]


def random_state(batch=2, heads=2, keys=8, values=6, dtype=torch.float32, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, values, keys, generator=generator, dtype=torch.float64).to(dtype)


def run(inputs, state=None, kernel="auto"):
    """Output, end state, and the gradients of a weighted sum of both."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, *([] if state is None else [state]))]
    y, end = wkv7(*leaves[:6], state=leaves[6] if state is not None else None, kernel=kernel)
    loss = sum((x.double() * torch.linspace(-1, 2, x.numel()).view(x.shape).cos()).sum() for x in (y, end))
    return y.detach(), end.detach(), torch.autograd.grad(loss, leaves)


def double(inputs):
    return [x.double() for x in inputs]


def by_definition(r, logw, k, v, a, b):
    """One sequence of one head by explicit matrices, ``(L, K)`` and ``(L, V)`` in float64."""
    state, outputs = torch.zeros(v.shape[1], k.shape[1], dtype=torch.float64), []
    for t in range(len(r)):
        state = state @ (torch.diag(logw[t].exp()) + torch.outer(a[t], b[t])) + torch.outer(v[t], k[t])
        outputs.append(state @ r[t])
    return torch.stack(outputs), state


@each_kernel
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_golden(dtype, tolerance, kernel):
    want = golden("wkv7_a")
    y, state = wkv7(*(want[key].to(dtype) for key in NAMES), kernel=kernel)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert error(y, want["y"]) < tolerance
    assert error(state, want["state"]) < tolerance


@each_kernel
def test_definition(kernel):
    inputs = random_inputs(21, dtype=torch.float64)
    y, state = wkv7(*inputs, kernel=kernel)
    for row in range(2):
        for head in range(2):
            want_y, want_state = by_definition(*(x[row, :, head] for x in inputs))
            assert error(y[row, :, head], want_y) < 1e-12
            assert error(state[row, head], want_state) < 1e-12


@fast_kernels
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 100, 257])
def test_reference_at_odd_lengths(length, kernel):
    inputs, state = random_inputs(length, seed=length), random_state()
    y, end, grads = run(inputs, state, kernel)
    want_y, want_end, want_grads = run(double(inputs), state.double(), "reference")
    assert error(y, want_y) < 5e-6
    assert error(end, want_end) < 5e-6
    for key, got, want in zip((*NAMES, "state"), grads, want_grads, strict=True):
        assert (got - want).abs().max() < 1e-5 * max(1, want.abs().max()), key


@fast_kernels
@pytest.mark.parametrize(("keys", "values"), [(16, 16), (32, 32), (64, 64), (1, 1), (5, 32), (32, 7)])
def test_reference_at_other_widths(keys, values, kernel):
    inputs, state = random_inputs(40, keys=keys, values=values), random_state(keys=keys, values=values)
    y, end, grads = run(inputs, state, kernel)
    want_y, want_end, want_grads = run(double(inputs), state.double(), "reference")
    for got, want in zip((y, end, *grads), (want_y, want_end, *want_grads), strict=True):
        assert error(got, want) < 1e-5


@fast_kernels
def test_reference_at_length_4097(kernel):
    inputs = random_inputs(4097, batch=1, heads=1)
    y, end, grads = run(inputs, kernel=kernel)
    want_y, want_end, want_grads = run(double(inputs), kernel="reference")
    assert error(y, want_y) < 5e-6
    assert error(end, want_end) < 5e-6
    for key, got, want in zip(NAMES, grads, want_grads, strict=True):
        assert error(got, want) < 1e-5, key


@fast_kernels
@pytest.mark.parametrize("decay", [0.0, 1e-4, 20.0, 400.0])
def test_decays_from_none_to_all_at_once(decay, kernel):
    inputs = random_inputs(70, decay=decay, seed=5)
    # one strong decay must cost the mild ones around it nothing
    inputs[1][:, 20] = -300
    y, end, grads = run(inputs, kernel=kernel)
    want_y, want_end, want_grads = run(double(inputs), kernel="reference")
    assert error(y, want_y) < 5e-6
    assert error(end, want_end) < 5e-6
    for key, got, want in zip(NAMES, grads, want_grads, strict=True):
        assert got.isfinite().all()
        assert (got - want).abs().max() < 1e-5 * max(1, want.abs().max()), key


@each_kernel
def test_a_state_may_be_forgotten_within_a_step(kernel):
    inputs = random_inputs(40)
    inputs[1][:, 10:12] = -torch.inf
    y, end, grads = run(inputs, kernel=kernel)
    assert all(x.isfinite().all() for x in (y, end, *grads))


@fast_kernels
def test_gradients_in_bfloat16(kernel):
    inputs = [x.bfloat16() for x in random_inputs(100)]
    _, _, grads = run(inputs, kernel=kernel)
    _, _, want_grads = run(double(inputs), kernel="reference")
    for key, got, want in zip(NAMES, grads, want_grads, strict=True):
        assert got.dtype == torch.bfloat16
        assert error(got, want) < 2e-2, key


@each_kernel
@pytest.mark.parametrize("length", [1, 6])
def test_gradcheck(length, kernel):
    sizes = {"batch": 1, "keys": 3, "values": 2, "dtype": torch.float64}
    leaves = [x.requires_grad_() for x in (*random_inputs(length, **sizes), random_state(**sizes))]
    assert torch.autograd.gradcheck(lambda *x: wkv7(*x[:6], state=x[6], kernel=kernel), leaves)


def test_gradcheck_across_chunks(monkeypatch):
    monkeypatch.setattr(wkv7_chunked, "STEPS", 4)
    monkeypatch.setattr(wkv7_chunked, "SEGMENT", 8)
    sizes = {"batch": 1, "heads": 1, "keys": 2, "values": 2, "dtype": torch.float64}
    leaves = [x.requires_grad_() for x in (*random_inputs(19, **sizes), random_state(**sizes))]
    assert torch.autograd.gradcheck(lambda *x: wkv7(*x[:6], state=x[6], kernel="torch"), leaves)


@each_kernel
def test_parts_equal_one_call(kernel):
    inputs = [x.requires_grad_() for x in random_inputs(150)]
    whole, whole_end = wkv7(*inputs, kernel=kernel)
    state, outputs = None, []
    for part in (slice(0, 1), slice(1, 64), slice(64, 150)):
        y, state = wkv7(*(x[:, part] for x in inputs), state=state, kernel=kernel)
        outputs.append(y)
    streamed = torch.cat(outputs, 1)
    assert error(streamed, whole) < 5e-6
    assert error(state, whole_end) < 5e-6
    weights = torch.linspace(0, 9, whole.numel()).view(whole.shape).sin()
    want = torch.autograd.grad((whole * weights).sum() + whole_end.sum(), inputs)
    got = torch.autograd.grad((streamed * weights).sum() + state.sum(), inputs)
    for key, x, y in zip(NAMES, got, want, strict=True):
        assert error(x, y) < 2e-5, key


@each_kernel
def test_a_masked_step_leaves_the_state(kernel):
    inputs = random_inputs(30)
    hidden = torch.zeros(30, dtype=torch.bool)
    hidden[[0, 7, 8, 29]] = True
    masked = [x.masked_fill(hidden[:, None, None], 0) for x in inputs[1:]]
    y, state = wkv7(inputs[0], *masked, kernel=kernel)
    want, want_state = wkv7(*(x[:, ~hidden] for x in inputs), kernel=kernel)
    assert error(y[:, ~hidden], want) < 5e-6
    assert error(state, want_state) < 5e-6


@each_kernel
def test_a_diverged_step_shows(kernel):
    inputs = random_inputs(30)
    inputs[2][0, 10] = torch.nan
    y, _ = wkv7(*inputs, kernel=kernel)
    assert y[0, 10:].isnan().all()
    assert y[1].isfinite().all()


@fast_kernels
def test_memory_layout_does_not_matter(kernel):
    inputs = random_inputs(20)
    want, want_end, want_grads = run(inputs, kernel=kernel)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    y, end, grads = run(strided, kernel=kernel)
    for got, expected in zip((y, end, *grads), (want, want_end, *want_grads), strict=True):
        assert torch.equal(got, expected)


def test_available_and_last_used():
    wkv7(*random_inputs(4))
    assert dispatch.last_used("wkv7") == KERNELS[0]
    assert KERNELS[-2:] == ["torch", "reference"]
    with pytest.raises(ValueError, match="it runs on cuda only"):
        wkv7(*random_inputs(4), kernel="fla")


def test_fla_says_what_it_needs(monkeypatch):
    # the function of the same name hides the module from a dotted path
    monkeypatch.setattr(import_module("attention.kernels.wkv7"), "find_spec", lambda name: None)
    kernel = next(kernel for kernel in dispatch._OPS["wkv7"] if kernel.name == "fla")
    assert "pip install fla-core" in kernel.missing()
    assert "bfloat16" in kernel.refuses(*random_inputs(4), state=None)
    assert "width 16" in kernel.refuses(*(x.bfloat16() for x in random_inputs(4)), state=None)
    assert kernel.refuses(*(x.bfloat16() for x in random_inputs(4, keys=16, values=32)), state=None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": torch.zeros(2, 2, 8)}, "r must be .B, L, H, K.*got"),
        ({"a": torch.zeros(2, 6, 2, 7)}, "a must have the shape of r"),
        ({"v": torch.zeros(2, 5, 2, 6)}, "v must be .*got"),
        (
            {"k": torch.zeros(2, 6, 2, 8, dtype=torch.int64)},
            "k must be of a floating .*got torch.int64; give",
        ),
        ({"v": torch.zeros(2, 6, 2, 6, device="meta")}, "r is on cpu, v on meta; give"),
        ({"logw": torch.full((2, 6, 2, 8), 0.3)}, "never positive; got 0.3; pass"),
        ({"state": torch.zeros(2, 2, 8, 6)}, r"\(B, H, V, K\)"),
        ({"kernel": "fast"}, "unknown for wkv7"),
    ],
)
def test_errors_say_what_to_change(change, message):
    with pytest.raises(ValueError, match=message) as error:
        wkv7(**dict(zip(NAMES, random_inputs(6))) | change)
    cases.assert_remedy(error.value)


def test_autocast_around_the_backward_of_the_carried_states_changes_no_bit():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 5, 8, 8), (2, 2, 5, 6, 8), (2, 2, 6, 8))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    states = wkv7_chunked._Carry.apply(*inputs)
    want = torch.autograd.grad(states.square().sum(), inputs, retain_graph=True)
    given = 2 * states.detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(states, inputs, given)
    assert all(map(torch.equal, found, want))
