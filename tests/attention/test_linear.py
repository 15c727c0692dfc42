import pytest
import torch

from attention.kernels import linear_attention
from tests import golden, reference
from tests.attention import cases

KERNELS = cases.op_kernels("linear_attention")


def bind(kernel):
    return lambda *args, **kwargs: linear_attention(*args, kernel=kernel, **kwargs)


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("length", cases.LENGTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_loops(kernel, length, mode):
    q, k, v = cases.inputs(length, batch=1, heads=1, value_width=5)
    masks = {"causal": "causal" in mode, "key_mask": None}
    if "mask" in mode:
        masks["key_mask"] = cases.mask_with_holes(length, batch=2)[:1]
    out = linear_attention(q, k, v, kernel=kernel, **masks)
    want = reference.linear_attention(q, k, v, **masks)
    assert golden.error(out, want) < 5e-6
    if length < 101 and want.requires_grad:  # a lone hidden token leaves nothing to differentiate
        for got, expected in zip(cases.gradients(out, (q, k, v)), cases.gradients(want, (q, k, v)), strict=True):
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bf16_sums_in_fp32(kernel, causal):
    q, k, v = cases.inputs(257, dtype=torch.bfloat16)
    out = linear_attention(q, k, v, causal=causal, kernel=kernel)
    want = linear_attention(q.double(), k.double(), v.double(), causal=causal, kernel="reference")
    assert out.dtype == torch.bfloat16
    # only the rounding of the output itself, 2^-9
    assert golden.error(out, want) < 4e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_features_keep_their_digits_far_below_zero(kernel):
    q, k, v = cases.inputs(20)
    with torch.no_grad():
        q -= 18.0
        k -= 18.0
    assert golden.error(bind(kernel)(q, k, v), reference.linear_attention(q, k, v)) < 1e-5


@pytest.mark.parametrize("poison", cases.POISON)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_content_is_never_read(kernel, poison):
    cases.check_poison(bind(kernel), poison)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_visible_key(kernel):
    cases.check_no_key(bind(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_causal_sees_no_future(kernel):
    cases.check_future(bind(kernel), atol=1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel, causal, monkeypatch):
    cases.require(kernel, dtype=torch.float64)
    monkeypatch.setattr("attention.kernels.linear.CHUNK", 2)
    tensors = cases.inputs(5, batch=2, heads=1, width=3, value_width=4, dtype=torch.float64)
    mask = cases.mask_with_holes(5)
    torch.autograd.gradcheck(lambda *x: bind(kernel)(*x, key_mask=mask, causal=causal), tensors)


@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
def test_memory_grows_linearly(causal):
    def saved(length):
        return cases.saved_bytes(lambda *x: linear_attention(*x, causal=causal, kernel="torch"), cases.inputs(length))

    assert saved(2048) < 2.1 * saved(1024)
    assert saved(2048) < 2 * 2 * 2048 * 2048 * 4 / 8


FAR = {
    "keys": (0, -100, -100),
    "queries": (-100, 0, 0),
    "both": (-200, -100, -100),
    "rising": (0, -300, 0),
    "falling": (0, 0, -300),
}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("width", [8, 13, 32])
@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("kernel", KERNELS)
def test_far_below_zero_only_differences_count(kernel, name, width, causal, masked):
    query, first, last = FAR[name]
    q, k, v = cases.inputs(130, heads=1, width=width)
    with torch.no_grad():
        q += query
        k += torch.linspace(first, last, 130)[:, None]
    mask = cases.mask_with_holes(130)[:1].expand(2, -1) if masked else None
    options = {"key_mask": mask, "causal": causal}
    out = linear_attention(q, k, v, kernel=kernel, **options)
    want = reference.linear_attention(q, k, v, **options)
    # inputs of some hundreds in fp32: their rounding, 1e-5, is one of the exponents
    assert golden.error(out, want) < 5e-5
    for got, expected in zip(cases.gradients(out, (q, k, v)), cases.gradients(want, (q, k, v)), strict=True):
        # where one key outweighs all, its gradient is a small difference, summed over all queries
        assert golden.error(got, expected) < 2e-4


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_stays_nan(kernel, name):
    tensors = dict(zip("qkv", (x.detach() for x in cases.inputs(20)), strict=True))
    tensors[name][0, 0, 3] = torch.nan
    out = linear_attention(**tensors, kernel=kernel)
    assert out[0, 0, 3].isnan().all()
    assert out[1].isfinite().all()


def test_tensors_on_two_devices_say_what_to_change():
    q, k, v = cases.inputs(4)
    with pytest.raises(ValueError, match="q is on cpu, k on meta; give k.to"):
        linear_attention(q, k.detach().to("meta"), v)
