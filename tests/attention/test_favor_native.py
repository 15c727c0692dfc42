"""What is particular to the C++ kernel of FAVOR+; what all kernels share is in ``test_favor``."""

import pytest
import torch

from attention.kernels import available, favor_attention, last_used
from attention.kernels.favor import orthogonal_projection
from tests import golden
from tests.attention import cases

pytestmark = pytest.mark.skipif("cpp" not in available("favor_attention", "cpu"), reason="no C++ compiler")


def draw(num_features, width):
    return orthogonal_projection(num_features, width, generator=torch.Generator().manual_seed(0))


def run(kernel, tensors, projection, mask=None, features="positive"):
    """Output and gradients of q, k, v."""
    out = favor_attention(*tensors, projection, key_mask=mask, features=features, kernel=kernel)
    return out, *cases.gradients(out, tensors)


def check(tensors, projection, tolerance=2e-5, mask=None, features="positive"):
    """fp32 against the float64 reference; gradients that are zero compare absolutely."""
    got = run("cpp", tensors, projection, mask, features)
    assert last_used("favor_attention") == "cpp"
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = run("reference", exact, projection.double(), mask, features)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize(
    ("length", "num_features", "width", "value_width"),
    [(1, 8, 8, 8), (47, 3, 8, 5), (49, 20, 16, 16), (130, 110, 32, 32), (97, 64, 5, 9), (50, 266, 64, 64)],
)
def test_shapes(length, num_features, width, value_width, features):
    tensors = cases.inputs(length, width=width, value_width=value_width)
    check(tensors, draw(num_features, width), features=features)


@pytest.mark.parametrize("batch", [1, 2])
def test_long_sequences_are_split(batch):
    tensors = cases.inputs(4097, batch=batch, heads=1, width=16)
    mask = None if batch == 1 else torch.arange(4097) < torch.tensor([[4097], [1500]])
    check(tensors, draw(24, 16), mask=mask)


@pytest.mark.parametrize("scale", [10.0, 25.0])
def test_large_keys(scale):
    q, k, v = cases.inputs(60, width=16)
    with torch.no_grad():
        k *= scale  # entries up to 100 and above
    out, *grads = run("cpp", (q, k, v), draw(32, 16))
    want, *expected = run("reference", [x.detach().double().requires_grad_() for x in (q, k, v)], draw(32, 16).double())
    # exponents of some thousands have an absolute error of 1e-4 in fp32
    assert golden.error(out, want) < 1e-3
    for a, b in zip(grads, expected, strict=True):
        assert (a - b).abs().max() < 5e-3 * b.abs().max().clamp(min=0.1)


def test_masks():
    tensors = cases.inputs(70)
    mask = cases.mask_with_holes(70)
    check(tensors, draw(20, 8), mask=mask)
    got = run("cpp", tensors, draw(20, 8), mask)
    assert all(not x[1].any() and x.isfinite().all() for x in got)
    one = torch.zeros(2, 70, dtype=torch.bool)
    one[:, 33] = True
    # gradients of q and k are zero here: sums over 70 queries that cancel, of terms that make up 68 in that of v
    check(tensors, draw(20, 8), mask=one, tolerance=1e-4)
    out = favor_attention(*tensors, draw(20, 8), key_mask=one, kernel="cpp")
    torch.testing.assert_close(out, tensors[2][:, :, 33:34].expand_as(out), rtol=1e-5, atol=1e-6)


def test_a_nan_at_a_visible_key_shows():
    q, k, v = cases.inputs(60)
    with torch.no_grad():
        k[0, 0, 5] = torch.nan
    out = favor_attention(q, k, v, draw(20, 8), kernel="cpp")
    assert out[0, 0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_exactly(dtype):
    tensors = cases.inputs(100, dtype=dtype, width=32, value_width=32)
    projection = draw(110, 32)
    want = run("cpp", [x.detach().float().requires_grad_() for x in tensors], projection)
    got = run("cpp", tensors, projection)
    assert torch.equal(got[0], want[0].to(dtype))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.dtype == dtype
        assert golden.error(a, b) < 2e-2


def test_strides_are_free():
    packed = torch.randn(2, 60, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    views = [packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in views]
    want = run("cpp", copies, draw(20, 8))
    for tensors in (views, turned):
        for a, b in zip(run("cpp", tensors, draw(20, 8)), want, strict=True):
            assert torch.equal(a, b)


def test_bitwise_repeatable_on_any_number_of_threads():
    tensors = cases.inputs(2000, width=16, value_width=16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(run("cpp", tensors, draw(40, 16)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_memory_holds_no_features():
    projection = draw(110, 32)
    tensors = cases.inputs(4096, width=32, value_width=32)
    saved = cases.saved_bytes(lambda *x: favor_attention(*x, projection, kernel="cpp"), tensors)
    # q, k, v, out and 1 / den are 4 * 32 + 1 numbers a token, features would be 110 more for each of q and k
    assert saved < 2 * 2 * 4096 * 140 * 4


def test_refuses():
    q, k, v = cases.inputs(4)
    with pytest.raises(ValueError, match=r"features=positive"):
        favor_attention(q, k, v, draw(4, 8), features="trig", kernel="cpp")
    with pytest.raises(ValueError, match=r"no causal form.*kernel=torch"):
        favor_attention(q, k, v, draw(4, 8), causal=True, kernel="cpp")
    with pytest.raises(ValueError, match=r"float64; use attention\.kernel=torch"):
        favor_attention(q.double(), k.double(), v.double(), draw(4, 8), kernel="cpp")
    with pytest.raises(ValueError, match="reference"):
        favor_attention(q, k, v, draw(4, 8).requires_grad_(), kernel="cpp")
