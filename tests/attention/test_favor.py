import pytest
import torch

from attention import kernels
from attention.kernels import favor_attention, favor_torch
from attention.kernels.favor import FEATURES, orthogonal_projection
from tests import golden, reference
from tests.attention import cases

KERNELS = cases.op_kernels("favor_attention")
FORWARD = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2}
BACKWARD = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])


def draw(num_features, width, kind="orthogonal", seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return orthogonal_projection(num_features, width, kind=kind, generator=generator, dtype=dtype)


def bind(kernel, features="positive"):
    def op(q, k, v, **kwargs):
        projection = draw(20, q.shape[-1]).to(torch.promote_types(q.dtype, torch.float32))
        return favor_attention(q, k, v, projection, features=features, kernel=kernel, **kwargs)

    return op


@pytest.mark.parametrize("dtype", FORWARD, ids=str)
@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("name", ["favor_a", "favor_b_m_not_multiple", "favor_c_large_norm"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_golden(kernel, name, mode, dtype, monkeypatch):
    cases.require(kernel, dtype=dtype)
    # several chunks, and a length that they do not divide
    monkeypatch.setattr(favor_torch, "CAUSAL_CHUNK", 16)
    monkeypatch.setattr(favor_torch._Sequence, "tile", lambda self: 16)
    want = golden.load(name)
    q, k, v = (want[x].to(dtype).requires_grad_() for x in "qkv")
    mask = want["key_mask"] if "mask" in mode else None
    out = favor_attention(q, k, v, want["W"], key_mask=mask, causal="causal" in mode, kernel=kernel)
    assert out.dtype == dtype
    assert kernels.last_used("favor_attention") == kernel
    assert golden.error(out, want[f"out_{mode}"]) < FORWARD[dtype]
    if f"g_q_{mode}" in want:
        out.backward(want["gy"].to(dtype))
        for x, tensor in zip("qkv", (q, k, v), strict=True):
            assert golden.error(tensor.grad, want[f"g_{x}_{mode}"]) < BACKWARD[dtype]


@pytest.mark.parametrize("name", ["favor_a", "favor_b_m_not_multiple", "favor_c_large_norm"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_golden_trig(kernel, name):
    cases.require(kernel, features="trig")
    want = golden.load(name)
    q, k, v = (want[x].double() for x in "qkv")
    out = favor_attention(q, k, v, want["W"].double(), features="trig", kernel=kernel)
    # fp64: denominators nearly cancel, which costs fp32 up to five digits whatever the kernel
    assert golden.error(out, want["out_trig_bidir"]) < 1e-9


@CAUSAL
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize("length", cases.LENGTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_loops(kernel, length, features, causal):
    q, k, v = cases.inputs(length, batch=1, heads=1, value_width=5)
    mask = None if length < 3 else cases.mask_with_holes(length)[:1]
    projection = draw(20, 8)
    out = favor_attention(q, k, v, projection, features=features, key_mask=mask, causal=causal, kernel=kernel)
    want = reference.favor_attention(q, k, v, projection, features=features, key_mask=mask, causal=causal)
    assert golden.error(out, want) < FORWARD[torch.float32]
    if length < 64:
        for got, expected in zip(cases.gradients(out, (q, k, v)), cases.gradients(want, (q, k, v)), strict=True):
            assert (got - expected).abs().max() < 2e-5 * expected.abs().max().clamp(min=1)


@CAUSAL
@pytest.mark.parametrize("features", FEATURES)
def test_kernels_agree_backward(features, causal):
    q, k, v = cases.inputs(100, dtype=torch.float64)
    mask = cases.mask_with_holes(100)
    outs = [bind(kernel, features)(q, k, v, key_mask=mask, causal=causal) for kernel in ("torch", "reference")]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
    grads = [cases.gradients(out, (q, k, v)) for out in outs]
    for got, want in zip(*grads, strict=True):
        assert golden.error(got, want) < 1e-6


def shrinking_norms(length):
    """Keys whose norm falls along the sequence: each raises the stabiliser of all before it beyond e^87."""
    q, k, v = cases.inputs(length, batch=1, heads=1, width=16)
    with torch.no_grad():
        k *= torch.linspace(30, 0, length)[:, None]
        q *= 3
    return q, k, v


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "reference"])
def test_causal_survives_any_order_of_norms(kernel, monkeypatch):
    ran, exact_chunk = [], favor_torch._exact_chunk
    monkeypatch.setattr(favor_torch, "_exact_chunk", lambda *args: ran.append(1) or exact_chunk(*args))
    q, k, v = shrinking_norms(40)
    for reverse in (False, True):
        tensors = [x.detach().flip(2) if reverse else x.detach() for x in (q, k, v)]
        tensors = [x.requires_grad_() for x in tensors]
        projection = draw(40, 16)
        out = favor_attention(*tensors, projection, causal=True, kernel=kernel)
        want = reference.favor_attention(*tensors, projection, causal=True)
        # exponents of some hundreds in fp32: 1e2 * 6e-8, summed
        assert golden.error(out, want) < 1e-4
        for got, expected in zip(cases.gradients(out, tensors), cases.gradients(want, tensors), strict=True):
            assert golden.error(got, expected) < 5e-4
    assert ran or kernel != "torch"


def test_exact_chunks_are_rare(monkeypatch):
    def never(*_):
        raise AssertionError("the slow exact form ran on ordinary inputs")

    monkeypatch.setattr(favor_torch, "_exact_chunk", never)
    q, k, v = cases.inputs(257, width=32)
    favor_attention(q, k, v, draw(110, 32), causal=True, kernel="torch")


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_norms_in_half_precision_stay_finite(dtype, causal):
    q, k, v = cases.inputs(70, width=32, dtype=dtype, scale=5.0)
    out = favor_attention(q, k, v, draw(64, 32), causal=causal, kernel="torch")
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in cases.gradients(out, (q, k, v)))


@CAUSAL
def test_autocast_leaves_exponents_in_fp32(causal):
    q, k, v = cases.inputs(70, width=32)
    want = favor_attention(q, k, v, draw(64, 32), causal=causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = favor_attention(q, k, v, draw(64, 32), causal=causal)
        grads = cases.gradients(out, (q, k, v))
    assert torch.equal(out, want)
    for got, expected in zip(grads, cases.gradients(want, (q, k, v)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("poison", cases.POISON)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masked_content_is_never_read(kernel, features, poison):
    cases.require(kernel, features=features)
    cases.check_poison(bind(kernel, features), poison)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_visible_key(kernel, features):
    cases.require(kernel, features=features)
    cases.check_no_key(bind(kernel, features))


@pytest.mark.parametrize("kernel", KERNELS)
def test_causal_sees_no_future(kernel):
    # a later key moves the stabiliser of its chunk, hence the rounding of rows before it, nothing else
    cases.check_future(bind(kernel), atol=1e-5)


@CAUSAL
@pytest.mark.parametrize("features", FEATURES)
def test_gradcheck(features, causal, monkeypatch):
    monkeypatch.setattr(favor_torch, "CAUSAL_CHUNK", 3)
    monkeypatch.setattr(favor_torch._Sequence, "tile", lambda self: 3)
    tensors = cases.inputs(7, batch=2, heads=1, width=3, value_width=4, dtype=torch.float64, scale=0.5)
    mask = cases.mask_with_holes(7)
    op = bind("torch", features)
    torch.autograd.gradcheck(lambda *x: op(*x, key_mask=mask, causal=causal), tensors)


@CAUSAL
def test_memory_holds_no_features(causal):
    num_features, width = 110, 32
    projection = draw(num_features, width)

    def saved(length):
        def op(q, k, v):
            return favor_attention(q, k, v, projection, causal=causal, kernel="torch")

        return cases.saved_bytes(op, cases.inputs(length, width=width, value_width=width))

    one_feature_tensor = 2 * 2 * 4096 * num_features * 4
    assert saved(4096) < 2.1 * saved(2048)
    # q, k, v, out and 1 / den are 4 * 32 + 1 numbers a token; causal adds a state every 64 tokens
    assert saved(4096) < one_feature_tensor * (1.8 if causal else 1.25)


def test_moments():
    want = golden.load("favor_moments")
    x, y, pairs = want["x"] * 16**-0.25, want["y"] * 16**-0.25, len(want["kernel"])
    x, y = x.double(), y.double()
    rows = draw(200 * 4096, 16, "iid", dtype=torch.float64).view(200, 4096, 16)
    positive, trig = torch.empty(200, pairs), torch.empty(200, pairs)
    norms = (x.square().sum(-1) + y.square().sum(-1)) / 2
    for index, block in enumerate(rows):
        positive[index] = (block @ (x + y).T - norms).exp().mean(0)
        trig[index] = (block @ (x - y).T).cos().mean(0) * norms.exp()
    for estimate, variance in ((positive, want["var_pos_iid_m1"]), (trig, want["var_trig_iid_m1"])):
        standard_error = (variance / 4096 / 200).sqrt()
        assert ((estimate.double().mean(0) - want["kernel"]).abs() < 5 * standard_error).all()
    # trig only: the sample variance of the positive estimator is heavy-tailed
    ratio = trig.double().var(0) / (want["var_trig_iid_m1"] / 4096)
    assert ((ratio > 0.6) & (ratio < 1.5)).all()


@pytest.mark.parametrize(("kind", "key"), [("iid", "iid"), ("orthogonal", "orth")])
def test_error_against_softmax(kind, key):
    want = golden.load("favor_limit_s0.5")
    q, k, v = (want[x].double() for x in "qkv")
    for num_features, expected in zip(want["m"].tolist(), want[f"relerr_{key}_mean"].tolist(), strict=True):
        errors = [
            (favor_attention(q, k, v, draw(num_features, 16, kind, seed, torch.float64)) - want["softmax"]).norm()
            / want["softmax"].norm()
            for seed in range(20)
        ]
        assert abs(torch.stack(errors).mean().item() / expected - 1) < 0.25, num_features


def test_projection_blocks():
    rows = draw(20, 8, dtype=torch.float64)
    norms = rows.norm(dim=1)
    for block in (rows[:8], rows[8:16], rows[16:]):
        gram = block @ block.T
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-12)
    # independent blocks: nothing repeats, not even the directions
    assert (rows[:8] / norms[:8, None] @ (rows[8:16] / norms[8:16, None]).T).abs().max() < 0.999
    assert norms.unique().numel() == 20
    torch.testing.assert_close(draw(20, 8, "regularised").norm(dim=1), torch.full((20,), 8**0.5), rtol=1e-5, atol=0)
    # every entry of every row is standard normal, sign included
    many = torch.stack([draw(4, 4, seed=seed) for seed in range(2000)])
    assert many.mean(0).abs().max() < 5 / 2000**0.5
    assert (many.var(0) - 1).abs().max() < 5 * (2 / 2000) ** 0.5
    assert torch.equal(draw(20, 8), draw(20, 8))
    with pytest.raises(ValueError, match="orthogonal"):
        draw(20, 8, "qr")


def test_wrong_arguments():
    q, k, v = cases.inputs(4)
    with pytest.raises(ValueError, match="positive"):
        favor_attention(q, k, v, draw(4, 8), features="relu")
    with pytest.raises(ValueError, match="projection must be"):
        favor_attention(q, k, v, draw(4, 7))
    for projection, message in (
        (draw(4, 8).long(), "projection must be of a floating point dtype; got torch.int64; give"),
        (draw(4, 8).cfloat(), "projection must be of a floating point dtype; got torch.complex64; give"),
        (draw(4, 8).to("meta"), "q is on cpu, projection on meta; give projection.to"),
    ):
        with pytest.raises(ValueError, match=message):
            favor_attention(q, k, v, projection)
    learned = draw(4, 8).requires_grad_()
    with pytest.raises(ValueError, match="reference"):
        favor_attention(q, k, v, learned, kernel="torch")
    cases.gradients(favor_attention(q, k, v, learned), (learned,))
    assert kernels.last_used("favor_attention") == "reference"


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("direction", ["falling", "rising"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_small_keys_after_large_ones_count(kernel, direction, masked):
    q, k, v = cases.inputs(60, width=16)
    sizes = torch.linspace(20, 0, 60) if direction == "falling" else torch.linspace(0, 20, 60)
    k = k * sizes[:, None]
    mask = cases.mask_with_holes(60) if masked else None
    projection = draw(40, 16)
    out = favor_attention(q, k, v, projection, key_mask=mask, causal=True, kernel=kernel)
    want = reference.favor_attention(q, k, v, projection, key_mask=mask, causal=True)
    # exponents reach 60 to 100, of which fp32 keeps five digits behind the point
    assert golden.error(out, want) < 1e-3
    if kernel == "reference":
        assert golden.error(out, want) < 1e-6
