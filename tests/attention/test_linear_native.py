"""What is particular to the C++ kernel of linear attention; what all kernels share is in ``test_linear``."""

import pytest
import torch

from attention.kernels import available, last_used, linear_attention
from tests import golden
from tests.attention import cases

pytestmark = pytest.mark.skipif("cpp" not in available("linear_attention", "cpu"), reason="no C++ compiler")


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])


def run(kernel, tensors, mask=None, causal=False):
    """Output and gradients of q, k, v."""
    out = linear_attention(*tensors, key_mask=mask, causal=causal, kernel=kernel)
    return out, *cases.gradients(out, tensors)


@CAUSAL
@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize(
    ("length", "width", "value_width"), [(1, 8, 8), (47, 5, 9), (130, 32, 32), (50, 64, 64), (1025, 16, 8)]
)
def test_against_float64(length, width, value_width, masked, causal):
    tensors = cases.inputs(length, width=width, value_width=value_width)
    mask = cases.mask_with_holes(length) if masked else None
    got = run("cpp", tensors, mask, causal)
    assert last_used("linear_attention") == "cpp"
    want = run("reference", [x.detach().double().requires_grad_() for x in tensors], mask, causal)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max().clamp(min=0.1)
    if masked:
        assert all(not x[1].any() for x in got)


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_exactly(dtype, causal):
    tensors = cases.inputs(100, dtype=dtype, width=32, value_width=32)
    want = run("cpp", [x.detach().float().requires_grad_() for x in tensors], causal=causal)
    got = run("cpp", tensors, causal=causal)
    assert torch.equal(got[0], want[0].to(dtype))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert golden.error(a, b) < 2e-2


@CAUSAL
def test_bitwise_repeatable_on_any_number_of_threads(causal):
    tensors = cases.inputs(2000, width=16, value_width=16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(run("cpp", tensors, causal=causal))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_refuses():
    q, k, v = cases.inputs(4)
    with pytest.raises(ValueError, match=r"float64; use attention\.kernel=torch"):
        linear_attention(q.double(), k.double(), v.double(), kernel="cpp")
