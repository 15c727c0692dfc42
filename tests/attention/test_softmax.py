import pytest
import torch

from attention import kernels
from attention.kernels import softmax, softmax_attention
from tests import golden, reference
from tests.attention import cases

KERNELS = cases.op_kernels("softmax_attention")
FORWARD = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}
BACKWARD = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}


def bind(kernel):
    return lambda *args, **kwargs: softmax_attention(*args, kernel=kernel, **kwargs)


@pytest.mark.parametrize("dtype", FORWARD, ids=str)
@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("name", ["softmax_a", "softmax_b_holes", "softmax_c_large"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_golden(kernel, name, mode, dtype):
    want = golden.load(name)
    q, k, v = (want[x].to(dtype).requires_grad_() for x in "qkv")
    mask = want["key_mask"] if "mask" in mode else None
    out = softmax_attention(q, k, v, key_mask=mask, causal="causal" in mode, kernel=kernel)
    assert out.dtype == dtype
    assert kernels.last_used("softmax_attention") == kernel
    assert golden.error(out, want[f"out_{mode}"]) < FORWARD[dtype]
    if f"g_q_{mode}" in want:
        out.backward(want["gy"].to(dtype))
        for x, tensor in zip("qkv", (q, k, v), strict=True):
            assert golden.error(tensor.grad, want[f"g_{x}_{mode}"]) < BACKWARD[dtype]


@pytest.mark.parametrize("mode", cases.MODES)
def test_flash_in_bf16_is_right_with_and_without_arithmetic_for_it(monkeypatch, mode):
    monkeypatch.setattr(softmax, "EMULATES_HALF", not softmax.EMULATES_HALF)
    test_golden("flash", "softmax_b_holes", mode, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", cases.MODES)
def test_where_half_precision_is_emulated_flash_computes_in_fp32(monkeypatch, mode, dtype):
    monkeypatch.setattr(softmax, "EMULATES_HALF", True)
    q, k, v = cases.inputs(65, dtype=dtype)
    options = {"key_mask": cases.mask_with_holes(65) if "mask" in mode else None, "causal": "causal" in mode}
    with torch.autocast("cpu", torch.bfloat16):
        out = softmax_attention(q, k, v, kernel="flash", **options)
    exact = softmax_attention(q.float(), k.float(), v.float(), kernel="flash", **options)
    assert torch.equal(out, exact.to(dtype))
    gradients = cases.gradients(out, (q, k, v)), cases.gradients(exact.to(dtype), (q, k, v))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("length", cases.LENGTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_loops(kernel, length, causal):
    q, k, v = cases.inputs(length, batch=1, heads=1, value_width=5)
    mask = None if length < 3 else cases.mask_with_holes(length, batch=2)[:1]
    out = softmax_attention(q, k, v, key_mask=mask, causal=causal, kernel=kernel)
    want = reference.softmax_attention(q, k, v, key_mask=mask, causal=causal)
    assert golden.error(out, want) < FORWARD[torch.float32]
    if length < 101:
        for got, expected in zip(cases.gradients(out, (q, k, v)), cases.gradients(want, (q, k, v)), strict=True):
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize("poison", cases.POISON)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_content_is_never_read(kernel, poison):
    cases.check_poison(bind(kernel), poison)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_visible_key(kernel):
    cases.check_no_key(bind(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_causal_sees_no_future(kernel):
    cases.check_future(bind(kernel), atol=0)


@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel, causal):
    tensors = cases.inputs(5, batch=2, heads=1, width=3, value_width=4, dtype=torch.float64)
    mask = cases.mask_with_holes(5)
    torch.autograd.gradcheck(lambda *x: bind(kernel)(*x, key_mask=mask, causal=causal), tensors)


@pytest.mark.parametrize("value_width", [4, 8, 13])
def test_flash_never_falls_back_to_the_materialised_form(value_width):
    q, k, v = cases.inputs(512, value_width=value_width)
    # neither another width of v nor a last dimension that is not contiguous may leave flash
    crooked = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in (q, k, v)]
    assert crooked[0].stride(-1) != 1
    for tensors in ((q, k, v), crooked):
        saved = cases.saved_bytes(bind("flash"), tensors)
        assert saved < 2 * 2 * 512 * 512 * 4 / 4
    torch.testing.assert_close(bind("flash")(*crooked), bind("reference")(q, k, v), rtol=1e-5, atol=1e-6)


def test_flash_that_cannot_run_raises(monkeypatch):
    def unavailable(*_, **__):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", unavailable)
    with pytest.raises(ValueError, match="use attention.kernel=reference"):
        softmax_attention(*cases.inputs(4), kernel="flash")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k[0], v[0], None), "must be"),
        (lambda q, k, v: (q, k[:, :, :2], v, None), "one shape"),
        (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0], None), "L > 0"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v, None), "E > 0"),
        (
            lambda q, k, v: (q, k, v.double(), None),
            "share a dtype; got .*float64; convert",
        ),
        (
            lambda q, k, v: (q.int(), k.int(), v.int(), None),
            "q must be of a floating .*got torch.int32; give",
        ),
        (lambda q, k, v: (q, k.to("meta"), v, None), "q is on cpu, k on meta; give"),
        (lambda q, k, v: (q, k, v, torch.zeros(2, 4)), "key_mask must be bool"),
        (lambda q, k, v: (q, k, v, torch.ones(2, 5, dtype=torch.bool)), "key_mask must be bool"),
    ],
    ids=["dimensions", "shape", "no-token", "no-width", "dtype", "integers", "device", "float-mask", "mask-shape"],
)
def test_wrong_inputs(change, message):
    q, k, v, mask = change(*cases.inputs(4))
    with pytest.raises(ValueError, match=message) as error:
        softmax_attention(q, k, v, key_mask=mask)
    cases.assert_remedy(error.value)
