"""The selective scan against golden vectors, its formula and itself, for every kernel."""

import pytest
import torch

from attention.kernels import dispatch
from attention.kernels.selective_scan import selective_scan
from tests.attention import cases
from tests.golden import error, load

KERNELS = dispatch.available("selective_scan", "cpu")
DOUBLE = [kernel for kernel in KERNELS if kernel != "cpp"]
GOLDEN = ["a", "b_big_dt", "c_n2048"]
SEQUENCES = ("u", "delta", "B", "C", "z")

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def random_inputs(batch, length, channels, states, dtype=torch.float32, seed=0):
    """All inputs by name; step sizes from tiny to about 4."""
    generator = torch.Generator().manual_seed(seed)
    sequence, shared, state = (batch, length, channels), (batch, length, states), (batch, channels, states)
    shapes = {
        "u": sequence, "delta": sequence, "A": (channels, states), "B": shared, "C": shared, "D": (channels,),
        "z": sequence, "delta_bias": (channels,), "state": state,
    }  # fmt: skip
    inputs = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
    inputs["A"] = -inputs["A"].exp()
    inputs["delta_bias"] -= 2
    return {key: value.to(dtype) for key, value in inputs.items()}


def gradients(inputs, kernel, seed=9):
    """y, the end state, and the gradients by name of a random sum of both."""
    inputs = {key: value.clone().requires_grad_() for key, value in inputs.items()}
    y, end = selective_scan(**inputs, kernel=kernel)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (y, end)]
    loss = (y * weights[0]).sum() + (end * weights[1]).sum()
    return y.detach(), end.detach(), dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values()))))


def assert_close(got, want, tolerance, label=None):
    if isinstance(want, dict):
        for key, value in want.items():
            assert_close(got[key], value, tolerance, key)
    else:
        assert error(got, want) < tolerance, label


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name, dtype, kernel):
    forward, backward = (5e-6, 1e-5) if dtype == torch.float32 else (2e-2, 3e-2)
    want = load(f"s6_{name}")
    inputs = {
        key: want[key].to(dtype if key in SEQUENCES else torch.float32).requires_grad_()
        for key in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    }
    y, state = selective_scan(**inputs, kernel=kernel)
    assert dispatch.last_used("selective_scan") == kernel
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert error(y, want["y"]) < forward
    assert error(state, want["h_last"]) < 5e-6
    y_noz, _ = selective_scan(**(inputs | {"z": None}), kernel=kernel)
    assert error(y_noz, want["y_noz"]) < forward
    if "gy" in want:
        (y * want["gy"]).sum().backward()
        for key, x in inputs.items():
            assert error(x.grad, want[f"g_{key}"]) < backward, key


@pytest.mark.parametrize("kernel", KERNELS[:-1])
@pytest.mark.parametrize(
    ("length", "channels", "states"), [(1, 1, 1), (2, 8, 2), (63, 33, 5), (100, 5, 16), (257, 40, 3)]
)
def test_odd_shapes_equal_the_reference(length, channels, states, kernel):
    inputs = random_inputs(2, length, channels, states, seed=length)
    want = gradients({key: x.double() for key, x in inputs.items()}, "reference")
    for part, wanted in zip(gradients(inputs, kernel), want):
        assert_close(part, wanted, 1e-5)


@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_optional_inputs(kernel):
    inputs = random_inputs(2, 40, 6, 4)
    for absent in (["D"], ["z"], ["delta_bias"], ["state"], ["D", "z", "delta_bias", "state"]):
        some = {key: x for key, x in inputs.items() if key not in absent}
        want = gradients({key: x.double() for key, x in some.items()}, "reference")
        for part, wanted in zip(gradients(some, kernel), want):
            assert_close(part, wanted, 1e-5)


@pytest.mark.parametrize("kernel", DOUBLE)
@pytest.mark.parametrize("segment", [1, 2**19], ids=["short_segments", "one_segment"])
def test_gradcheck(segment, kernel, monkeypatch):
    monkeypatch.setattr("attention.kernels.selective_scan_chunked.SEGMENT", segment)
    inputs = {key: x.requires_grad_() for key, x in random_inputs(2, 7, 3, 2, dtype=torch.float64).items()}

    def run(*values):
        return selective_scan(**dict(zip(inputs, values)), kernel=kernel)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


@each_kernel
def test_chunks_equal_one_call(kernel):
    inputs = random_inputs(2, 150, 6, 4)
    y, end, want = gradients(inputs, kernel)
    leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
    state, parts = leaves["state"], []
    for part in (slice(0, 1), slice(1, 64), slice(64, 150)):
        now = {key: x[:, part] if key in SEQUENCES else x for key, x in leaves.items()}
        y_part, state = selective_scan(**(now | {"state": state}), kernel=kernel)
        parts.append(y_part)
    streamed = torch.cat(parts, 1)
    assert error(streamed, y) < 5e-6
    assert error(state, end) < 5e-6
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).float() for x in (y, end)]
    loss = (streamed * weights[0]).sum() + (state * weights[1]).sum()
    assert_close(dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())))), want, 1e-5)


@each_kernel
@pytest.mark.parametrize("delta", [30.0, 1000.0])
def test_large_steps_forget_the_past(delta, kernel):
    inputs = random_inputs(1, 40, 6, 4) | {"delta": torch.full((1, 40, 6), delta)}
    y, end, grads = gradients(inputs, kernel)
    _, want, _ = gradients({key: x.double() for key, x in inputs.items()}, "reference")
    assert_close(end, want, 1e-5)
    assert all(x.isfinite().all() for x in (y, end, *grads.values()))


@each_kernel
def test_a_step_of_size_zero_leaves_the_state_alone(kernel):
    inputs = random_inputs(2, 90, 6, 4)
    hidden = torch.rand(2, 90, 1, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[1, :50] = True
    inputs["u"], inputs["delta"] = inputs["u"].masked_fill(hidden, 0), inputs["delta"].masked_fill(hidden, -torch.inf)
    y, end, grads = gradients(inputs, kernel)
    assert all(x.isfinite().all() for x in grads.values())
    assert not grads["delta"][hidden.expand_as(y)].any()
    for row in range(2):
        real = ~hidden[row, :, 0]
        short = {key: x[row : row + 1] if x.dim() == 3 else x for key, x in inputs.items()}
        short |= {key: short[key][:, real] for key in SEQUENCES}
        y_short, end_short = selective_scan(**short, kernel=kernel)
        assert error(y[row, real], y_short[0]) < 1e-6
        assert error(end[row], end_short[0]) < 1e-6
    nothing = {"u": torch.zeros(2, 90, 6), "delta": torch.full((2, 90, 6), -torch.inf)}
    _, untouched = selective_scan(**(inputs | nothing), kernel=kernel)
    assert torch.equal(untouched, inputs["state"])


@each_kernel
def test_a_diverged_input_shows(kernel):
    for key in ("u", "delta", "B", "A"):
        inputs = random_inputs(1, 30, 4, 3)
        (inputs[key][0, 10] if key != "A" else inputs[key])[..., 0] = torch.nan
        y, _ = selective_scan(**inputs, kernel=kernel)
        assert y[0, 10:, 0].isnan().all(), key


@each_kernel
def test_threads_change_nothing(kernel):
    inputs = random_inputs(3, 70, 70, 4)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradients(inputs, kernel)
        torch.set_num_threads(2)
        two = gradients(inputs, kernel)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], two[0])
    if kernel == "cpp":
        assert all(torch.equal(one[2][key], two[2][key]) for key in inputs)


def test_cpp_leaves_float64_to_torch():
    if "cpp" not in KERNELS:
        pytest.skip("no C++ kernel here")
    inputs = random_inputs(1, 4, 2, 2, dtype=torch.float64)
    selective_scan(**inputs)
    assert dispatch.last_used("selective_scan") == "torch"
    with pytest.raises(ValueError, match=r"computes in fp32 and u is fp64; use attention\.kernel=torch"):
        selective_scan(**inputs, kernel="cpp")


def test_mamba_ssm_says_what_to_install():
    inputs = random_inputs(1, 4, 2, 2)
    with pytest.raises(ValueError, match="runs on cuda only"):
        selective_scan(**inputs, kernel="mamba_ssm")
    kernel = next(k for k in dispatch._kernels("selective_scan") if k.name == "mamba_ssm")
    if kernel.missing() is not None:
        assert "pip install mamba-ssm causal-conv1d" in kernel.missing()
    assert "attention.kernel=torch" in kernel.refuses(torch.zeros(1, dtype=torch.float64), state=None)
    assert "state=None" in kernel.refuses(*list(inputs.values())[:6], state=inputs["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": torch.zeros(2, 0, 4)}, "L, D > 0.*leave out"),
        ({"u": torch.zeros(2, 6, 4, dtype=torch.int64)}, "u must be of a floating point dtype; got torch.int64; give"),
        ({"C": torch.zeros(2, 6, 3, device="meta")}, "u is on cpu, C on meta; give"),
        ({"A": torch.zeros(3, 2)}, r"A must be \(4, N\).*got \(3, 2\)"),
        ({"A": torch.zeros(4, 2, dtype=torch.complex64)}, "A must be of a floating point dtype; got torch.complex64"),
        ({"B": torch.zeros(2, 6, 5)}, r"B must be \(2, 6, 3\).*got \(2, 6, 5\)"),
        ({"state": torch.zeros(1, 4, 3)}, r"state must be \(2, 4, 3\).*got \(1, 4, 3\)"),
        ({"kernel": "fast"}, "unknown for selective_scan"),
    ],
)
def test_errors_say_what_to_change(change, message):
    with pytest.raises(ValueError, match=message) as error:
        selective_scan(**(random_inputs(2, 6, 4, 3) | change))
    cases.assert_remedy(error.value)
