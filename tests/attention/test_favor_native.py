"""What is particular to the C++ kernel of FAVOR+; what all kernels share is in ``test_favor``."""

import pytest
import torch

from attention.kernels import available, favor_attention, last_used
from attention.kernels.favor import orthogonal_projection
from tests import golden, reference
from tests.attention import cases

pytestmark = pytest.mark.skipif("cpp" not in available("favor_attention", "cpu"), reason="no C++ compiler")


def draw(num_features, width):
    return orthogonal_projection(num_features, width, generator=torch.Generator().manual_seed(0))


CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])


def run(kernel, tensors, projection, mask=None, features="positive", causal=False):
    """Output and gradients of q, k, v."""
    out = favor_attention(*tensors, projection, key_mask=mask, features=features, causal=causal, kernel=kernel)
    return out, *cases.gradients(out, tensors)


def check(tensors, projection, tolerance=2e-5, mask=None, features="positive", causal=False):
    """fp32 against the float64 reference; gradients that are zero compare absolutely."""
    got = run("cpp", tensors, projection, mask, features, causal)
    assert last_used("favor_attention") == "cpp"
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = run("reference", exact, projection.double(), mask, features, causal)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < tolerance * b.abs().max().clamp(min=1)


@CAUSAL
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize(
    ("length", "num_features", "width", "value_width"),
    [(1, 8, 8, 8), (47, 3, 8, 5), (49, 20, 16, 16), (130, 110, 32, 32), (97, 64, 5, 9), (50, 266, 64, 64)],
)
def test_shapes(length, num_features, width, value_width, features, causal):
    tensors = cases.inputs(length, width=width, value_width=value_width)
    check(tensors, draw(num_features, width), features=features, causal=causal)


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


@CAUSAL
def test_masks_with_holes(causal):
    tensors = cases.inputs(150)
    mask = cases.mask_with_holes(150)
    # 48 to 95 are one tile without a key, after and before tiles with some
    mask[0, 48:96] = False
    check(tensors, draw(20, 8), mask=mask, causal=causal)
    got = run("cpp", tensors, draw(20, 8), mask, causal=causal)
    assert all(not x[1].any() and x.isfinite().all() for x in got)


def test_one_visible_key():
    tensors = cases.inputs(70)
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


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_exactly(dtype, causal):
    tensors = cases.inputs(100, dtype=dtype, width=32, value_width=32)
    projection = draw(110, 32)
    want = run("cpp", [x.detach().float().requires_grad_() for x in tensors], projection, causal=causal)
    got = run("cpp", tensors, projection, causal=causal)
    assert torch.equal(got[0], want[0].to(dtype))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.dtype == dtype
        assert golden.error(a, b) < 2e-2


@CAUSAL
def test_strides_are_free(causal):
    packed = torch.randn(2, 60, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    views = [packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in views]
    want = run("cpp", copies, draw(20, 8), causal=causal)
    for tensors in (views, turned):
        for a, b in zip(run("cpp", tensors, draw(20, 8), causal=causal), want, strict=True):
            assert torch.equal(a, b)


@CAUSAL
def test_bitwise_repeatable_on_any_number_of_threads(causal):
    tensors = cases.inputs(2000, width=16, value_width=16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            results.append(run("cpp", tensors, draw(40, 16), causal=causal))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def falling_norms(length):
    """Keys whose norm falls along the sequence: each raises the stabiliser of all before it beyond e^87."""
    q, k, v = cases.inputs(length, batch=1, heads=1, width=16)
    with torch.no_grad():
        k *= torch.linspace(30, 0, length)[:, None]
        q *= 3
    return q, k, v


def test_only_tiles_that_lose_digits_go_by_single_positions():
    def split(tensors):
        return torch.ops.lra_favor.causal_forward(*(x.detach() for x in tensors), draw(40, 16), None)[3]

    assert split(falling_norms(120)).all()
    assert not split([x.flip(2) for x in falling_norms(120)]).any()
    assert not split(cases.inputs(257, width=16)).any()


def test_causal_tiles_of_single_positions():
    tensors, projection = falling_norms(120), draw(40, 16)
    mask = torch.arange(120).remainder(7).ne(0)[None]
    out = favor_attention(*tensors, projection, key_mask=mask, causal=True, kernel="cpp")
    want = reference.favor_attention(*tensors, projection, key_mask=mask, causal=True)
    # exponents of some thousands in fp32: 1e3 * 6e-8, summed
    assert golden.error(out, want) < 5e-4
    for got, expected in zip(cases.gradients(out, tensors), cases.gradients(want, tensors), strict=True):
        assert golden.error(got, expected) < 2e-3


def test_causal_memory_is_linear():
    def saved(length):
        def op(*x):
            return favor_attention(*x, projection, causal=True, kernel="cpp")

        return cases.saved_bytes(op, cases.inputs(length, width=32, value_width=32))

    projection = draw(110, 32)
    # q, k, v and 1 / den are 3 * 32 + 1 numbers a token, a state of 110 * (32 + 2) is kept every 48; features are 220
    assert saved(3072) < 2.1 * saved(1536) < 2.1 * 2 * 2 * 1536 * 220 * 4


def test_memory_holds_no_features():
    projection = draw(110, 32)
    tensors = cases.inputs(4096, width=32, value_width=32)
    saved = cases.saved_bytes(lambda *x: favor_attention(*x, projection, kernel="cpp"), tensors)
    # q, k, v and 1 / den are 3 * 32 + 1 numbers a token, features would be 110 more for each of q and k
    assert saved < 2 * 2 * 4096 * 105 * 4


def test_refuses():
    q, k, v = cases.inputs(4)
    with pytest.raises(ValueError, match=r"features=positive"):
        favor_attention(q, k, v, draw(4, 8), features="trig", kernel="cpp")
    with pytest.raises(ValueError, match=r"float64; use attention\.kernel=torch"):
        favor_attention(q.double(), k.double(), v.double(), draw(4, 8), kernel="cpp")
    with pytest.raises(ValueError, match="reference"):
        favor_attention(q, k, v, draw(4, 8).requires_grad_(), kernel="cpp")
