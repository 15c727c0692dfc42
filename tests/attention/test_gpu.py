"""Golden vectors on a CUDA device, for every kernel that runs there: ``pytest -m gpu``, or ``scripts/gpu_check``.

The same checks run with every kernel of the CPU in ``test_the_checks_themselves``.
"""

import warnings

import pytest
import torch

from attention import kernels
from attention.kernels import dispatch, favor_attention, linear_attention, selective_scan, softmax_attention, wkv4, wkv7
from tests import golden, reference
from tests.attention import cases

HALF = {torch.float16: (2e-2, 3e-2), torch.bfloat16: (2e-2, 3e-2)}
LIMITS = {
    "softmax_attention": {torch.float32: (2e-5, 5e-6), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
    "favor_attention": {torch.float32: (2e-5, 2e-5), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
    "linear_attention": {torch.float32: (2e-5, 2e-5), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
    "wkv4": {torch.float32: (5e-5, 3e-4), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
    "wkv7": HALF | {torch.float32: (5e-6, 2e-5)},
    # the authors' kernel is built with fast, less exact exponentials
    "selective_scan": HALF | {torch.float32: (2e-5, 5e-5)},
}
FILES = {
    "softmax_attention": ["softmax_a", "softmax_b_holes", "softmax_c_large"],
    "favor_attention": ["favor_a", "favor_b_m_not_multiple", "favor_c_large_norm"],
    "linear_attention": ["softmax_a", "softmax_b_holes"],
    "wkv4": [f"wkv4_{x}" for x in ("a", "b_holes", "c_overflow100", "d_ramp", "e_n4096", "f_extreme_decay")],
    "wkv7": ["wkv7_a"],
    "selective_scan": ["s6_a", "s6_b_big_dt", "s6_c_n2048"],
}
with warnings.catch_warnings():
    # fla and mamba_ssm, imported here, may use what this torch deprecates: no fault of a kernel
    warnings.simplefilter("ignore")
    CUDA_CASES = [(op, kernel, name) for op in FILES for kernel in kernels.available(op, "cuda") for name in FILES[op]]


def on(device, tensor, dtype):
    return tensor.to(device, dtype).requires_grad_()


def check_heads(op, kernel, name, dtype, device):
    """``softmax_attention`` and ``favor_attention``, in every mode that the kernel takes; how many it took."""
    forward, backward = LIMITS[op][dtype]
    took = 0
    for mode in cases.MODES:
        for skip in (False, True) if op == "softmax_attention" and "mask" in mode else (False,):
            want = golden.load(name)
            q, k, v = (on(device, want[x], dtype) for x in "qkv")
            options = {"key_mask": want["key_mask"].to(device)} if "mask" in mode else {}
            options |= {"skip_masked_queries": True} if skip else {}
            extra = [want["W"].to(device)] if op == "favor_attention" else []
            function = favor_attention if extra else softmax_attention
            try:
                out = function(q, k, v, *extra, causal="causal" in mode, kernel=kernel, **options)
            except ValueError as refusal:
                assert "cannot run" in str(refusal)  # noqa: PT017
                continue
            took += 1
            expected = want[f"out_{mode}"]
            if skip:
                expected = expected.masked_fill(~want["key_mask"][:, None, :, None], 0.0)
            assert golden.error(out.cpu(), expected) < forward, (mode, skip)
            if f"g_q_{mode}" in want and not skip:
                out.backward(want["gy"].to(device, dtype))
                for x, tensor in zip("qkv", (q, k, v), strict=True):
                    assert golden.error(tensor.grad.cpu(), want[f"g_{x}_{mode}"]) < backward, (mode, x)
    return took


def check_wkv4(kernel, name, dtype, device):
    """Output, end state and gradients."""
    forward, backward = LIMITS["wkv4"][dtype]
    want = golden.load(name)
    inputs = [on(device, want[key], dtype if key in "kv" else torch.float32) for key in ("time_decay", "u", "k", "v")]
    y, (num, den, scale) = wkv4(*inputs, kernel=kernel)
    assert golden.error(y.cpu(), want["y"]) < forward
    factor = torch.exp(scale.cpu().double() - want["state_max"])
    assert golden.error(num.cpu() * factor, want["state_num"]) < forward
    assert golden.error(den.cpu() * factor, want["state_den"]) < forward
    (y * want["gy"].to(device)).sum().backward()
    for key, x in zip(("time_decay", "u", "k", "v"), inputs):
        assert golden.error(x.grad.cpu(), want[f"g_{key}"]) < backward, key
    return 1


def check_linear(kernel, name, dtype, device):
    """Against plain loops in float64, as there are no golden outputs; gradients of the masked form."""
    forward, backward = LIMITS["linear_attention"][dtype]
    want = golden.load(name)
    for causal in (False, True):
        exact = [want[x].double().requires_grad_() for x in "qkv"]
        expected = reference.linear_attention(*exact, key_mask=want["key_mask"], causal=causal)
        inputs = [on(device, want[x], dtype) for x in "qkv"]
        out = linear_attention(*inputs, key_mask=want["key_mask"].to(device), causal=causal, kernel=kernel)
        assert golden.error(out.cpu(), expected) < forward, causal
        grads = torch.autograd.grad(out, inputs, want["gy"].to(device, dtype))
        for x, got, grad in zip("qkv", grads, torch.autograd.grad(expected, exact, want["gy"].double())):
            assert golden.error(got.cpu(), grad) < backward, (causal, x)
    return 1


def taken(op, run):
    """What ``run`` gives, or None where the kernel says that it takes no such input."""
    try:
        return run()
    except ValueError as refusal:
        assert f"of {op} cannot run" in str(refusal)  # noqa: PT017
        return None


def check_wkv7(kernel, name, dtype, device):
    """Output and end state; gradients against the reference in float64, which the golden files lack."""
    forward, backward = LIMITS["wkv7"][dtype]
    want, keys = golden.load(name), ("r", "logw", "k", "v", "a", "b")
    inputs = [on(device, want[key], torch.float32 if key == "logw" else dtype) for key in keys]
    found = taken("wkv7", lambda: wkv7(*inputs, kernel=kernel))
    if found is None:
        return 0
    assert golden.error(found[0].cpu(), want["y"]) < forward
    assert golden.error(found[1].cpu(), want["state"]) < forward
    exact = [want[key].double().requires_grad_() for key in keys]
    expected = wkv7(*exact, kernel="reference")
    weights = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape).cos() for x in expected]
    grads = torch.autograd.grad(found, inputs, [w.to(device, x.dtype) for w, x in zip(weights, found)])
    for key, got, grad in zip(keys, grads, torch.autograd.grad(expected, exact, weights)):
        assert golden.error(got.cpu(), grad) < backward, key
    return 1


def check_selective_scan(kernel, name, dtype, device):
    """Output with and without gate, end state, and gradients where the file has them."""
    forward, backward = LIMITS["selective_scan"][dtype]
    want, sequences = golden.load(name), ("u", "delta", "B", "C", "z")
    keys = (*sequences, "A", "D", "delta_bias")
    inputs = {key: on(device, want[key], dtype if key in sequences else torch.float32) for key in keys}
    found = taken("selective_scan", lambda: selective_scan(**inputs, kernel=kernel))
    if found is None:
        return 0
    assert golden.error(found[0].cpu(), want["y"]) < forward
    assert golden.error(found[1].cpu(), want["h_last"]) < forward
    y, _ = selective_scan(**(inputs | {"z": None}), kernel=kernel)
    assert golden.error(y.cpu(), want["y_noz"]) < forward
    if "gy" in want:
        (found[0] * want["gy"].to(device)).sum().backward()
        for key, x in inputs.items():
            assert golden.error(x.grad.cpu(), want[f"g_{key}"]) < backward, key
    return 1


CHECKS = {
    "linear_attention": check_linear,
    "wkv4": check_wkv4,
    "wkv7": check_wkv7,
    "selective_scan": check_selective_scan,
}


def check(op, kernel, name, dtype, device):
    if op in CHECKS:
        return CHECKS[op](kernel, name, dtype, device)
    return check_heads(op, kernel, name, dtype, device)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", LIMITS["wkv4"], ids=str)
@pytest.mark.parametrize(("op", "kernel", "name"), CUDA_CASES)
def test_golden_on_cuda(op, kernel, name, dtype):
    # fp32 products in fp32: what is checked is the formula
    torch.backends.cuda.matmul.allow_tf32 = False
    if not check(op, kernel, name, dtype, "cuda"):
        pytest.skip(f"{kernel} takes none of these in {dtype}")


@pytest.mark.parametrize(("op", "kernel"), [(op, kernel) for op in FILES for kernel in kernels.available(op, "cpu")])
def test_the_checks_themselves(op, kernel):
    for dtype in (torch.float32, torch.bfloat16):
        assert check(op, kernel, FILES[op][0], dtype, "cpu")


@pytest.mark.parametrize("op", CHECKS)
def test_the_checks_notice_a_wrong_kernel(op, monkeypatch):
    real = dispatch.call

    def wrong(*args, **kwargs):
        found = real(*args, **kwargs)
        return (found[0] * 1.1, *found[1:]) if isinstance(found, tuple) else found * 1.1

    monkeypatch.setattr(dispatch, "call", wrong)
    with pytest.raises(AssertionError):
        check(op, "torch", FILES[op][0], torch.bfloat16, "cpu")


def test_every_op_has_checks():
    assert set(FILES) == set(dispatch.ops())
