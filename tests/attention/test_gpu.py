"""Golden vectors on a CUDA device, for every kernel that runs there: ``pytest -m gpu``, or ``scripts/gpu_check``.

The same checks run on the CPU with its fastest kernel in ``test_the_checks_themselves``.
"""

import pytest
import torch

from attention import kernels
from attention.kernels import favor_attention, softmax_attention, wkv4
from tests import golden
from tests.attention import cases

LIMITS = {
    "softmax_attention": {torch.float32: (2e-5, 5e-6), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
    "favor_attention": {torch.float32: (2e-5, 2e-5), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
    "wkv4": {torch.float32: (5e-5, 3e-4), torch.float16: (1e-2, 2e-2), torch.bfloat16: (1e-2, 2e-2)},
}
FILES = {
    "softmax_attention": ["softmax_a", "softmax_b_holes", "softmax_c_large"],
    "favor_attention": ["favor_a", "favor_b_m_not_multiple", "favor_c_large_norm"],
    "wkv4": [f"wkv4_{x}" for x in ("a", "b_holes", "c_overflow100", "d_ramp", "e_n4096", "f_extreme_decay")],
}
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


def check(op, kernel, name, dtype, device):
    if op == "wkv4":
        return check_wkv4(kernel, name, dtype, device)
    return check_heads(op, kernel, name, dtype, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", LIMITS["wkv4"], ids=str)
@pytest.mark.parametrize(("op", "kernel", "name"), CUDA_CASES)
def test_golden_on_cuda(op, kernel, name, dtype):
    # fp32 products in fp32: what is checked is the formula
    torch.backends.cuda.matmul.allow_tf32 = False
    if not check(op, kernel, name, dtype, "cuda"):
        pytest.skip(f"{kernel} takes none of these in {dtype}")


@pytest.mark.parametrize("op", FILES)
def test_the_checks_themselves(op):
    kernel = kernels.available(op, "cpu")[0]
    for dtype in (torch.float32, torch.bfloat16):
        assert check(op, kernel, FILES[op][0], dtype, "cpu")
