"""Flash attention that takes padding out: the CPU's groups of rows, and CUDA's packed form with its kernel replaced."""

import pytest
import torch

from attention import kernels
from attention.kernels import softmax_attention, softmax_varlen
from tests import golden
from tests.attention import cases

DTYPES = {torch.float32: (2e-5, 5e-6), torch.bfloat16: (1e-2, 2e-2)}


@pytest.fixture
def always(monkeypatch):
    """Take padding out however little it saves; returns the calls that ran."""
    ran, plan = [], softmax_varlen.plan

    def spy(*args, **kwargs):
        ran.append(plan(*args, **kwargs))
        return ran[-1]

    monkeypatch.setattr(softmax_varlen, "CALL_WORK", -1)
    monkeypatch.setattr(softmax_varlen, "plan", spy)
    return ran


def lengths_mask(lengths, length):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def compare(q, k, v, mask, causal, skip, dtype=torch.float32):
    """Against the reference, forward and backward."""
    results = []
    for kernel in ("flash", "reference"):
        out = softmax_attention(q, k, v, key_mask=mask, causal=causal, skip_masked_queries=skip, kernel=kernel)
        results.append((out, *cases.gradients(out, (q, k, v))))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got - want).abs().max() < DTYPES[dtype][1] * want.abs().max().clamp(min=1)
    if skip:
        hidden = ~mask[:, None, :, None].expand_as(q)
        assert not results[0][0][~mask[:, None, :, None].expand_as(results[0][0])].any()
        assert not results[0][1][hidden].any()


@pytest.mark.parametrize("mode", ["mask", "causal_mask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["softmax_a", "softmax_c_large"])
def test_golden_at_every_position(name, dtype, mode, always):
    want = golden.load(name)
    q, k, v = (want[x].to(dtype).requires_grad_() for x in "qkv")
    out = softmax_attention(q, k, v, key_mask=want["key_mask"], causal="causal" in mode, kernel="flash")
    assert golden.error(out, want[f"out_{mode}"]) < DTYPES[dtype][0]
    if f"g_q_{mode}" in want:
        out.backward(want["gy"].to(dtype))
        for x, tensor in zip("qkv", (q, k, v), strict=True):
            assert golden.error(tensor.grad, want[f"g_{x}_{mode}"]) < DTYPES[dtype][1]
    assert bool(always) == ("causal" not in mode)


@pytest.mark.parametrize("kernel", cases.op_kernels("softmax_attention"))
@pytest.mark.parametrize("mode", ["mask", "causal_mask"])
@pytest.mark.parametrize("name", ["softmax_a", "softmax_b_holes", "softmax_c_large"])
def test_golden_at_real_positions(name, mode, kernel, always):
    want = golden.load(name)
    mask = want["key_mask"]
    q, k, v = (want[x] for x in "qkv")
    out = softmax_attention(q, k, v, key_mask=mask, causal="causal" in mode, skip_masked_queries=True, kernel=kernel)
    real = mask[:, None, :, None]
    assert golden.error(out, want[f"out_{mode}"].masked_fill(~real, 0.0)) < 2e-5


@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("call_work", [-1, 5000, 10**9], ids=["alone", "grouped", "together"])
@pytest.mark.parametrize("lengths", [[40, 1, 17, 0, 40, 33], [0, 0, 0, 0, 0, 3]], ids=str)
def test_suffix_padding(lengths, call_work, causal, skip, monkeypatch):
    monkeypatch.setattr(softmax_varlen, "CALL_WORK", call_work)
    monkeypatch.setattr(softmax_varlen, "COPY_WORK", 0)
    q, k, v = cases.inputs(40, batch=len(lengths))
    compare(q, k, v, lengths_mask(lengths, 40), causal, skip)


@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidir", "causal"])
@pytest.mark.parametrize("call_work", [-1, 10000], ids=["alone", "grouped"])
def test_holes(call_work, causal, skip, monkeypatch):
    monkeypatch.setattr(softmax_varlen, "CALL_WORK", call_work)
    monkeypatch.setattr(softmax_varlen, "COPY_WORK", 0)
    q, k, v = cases.inputs(40, batch=5)
    mask = torch.rand(5, 40, generator=torch.Generator().manual_seed(1)) < torch.linspace(0, 1, 5)[:, None]
    compare(q, k, v, mask, causal, skip)


@pytest.mark.parametrize("call_work", [-1, 10000], ids=["alone", "grouped"])
@pytest.mark.parametrize("poison", cases.POISON)
def test_padding_is_never_read(poison, call_work, monkeypatch):
    monkeypatch.setattr(softmax_varlen, "CALL_WORK", call_work)
    monkeypatch.setattr(softmax_varlen, "COPY_WORK", 0)
    q, k, v = cases.inputs(40, batch=4)
    mask = lengths_mask([40, 38, 5, 0], 40)
    hidden = ~mask[:, None, :, None]
    bad = [x.detach().masked_fill(hidden, poison).requires_grad_() for x in (q, k, v)]
    results = []
    for tensors in ((q, k, v), bad):
        out = softmax_attention(*tensors, key_mask=mask, skip_masked_queries=True, kernel="flash")
        results.append((out, *cases.gradients(out, tensors)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("skip", [False, True], ids=["all", "skip"])
def test_gradcheck(skip, always):
    tensors = cases.inputs(5, batch=3, heads=1, width=3, value_width=3, dtype=torch.float64)
    options = {"key_mask": lengths_mask([5, 3, 2], 5), "skip_masked_queries": skip, "kernel": "flash"}
    torch.autograd.gradcheck(lambda *x: softmax_attention(*x, **options), tensors)


def test_plan_splits_where_it_pays():
    width = 128
    assert len(softmax_varlen.plan(list(range(64, 2049, 64)), 2048, width, skip=True)) == 32
    # short rows share a call, long ones are read in place
    groups = softmax_varlen.plan([900, 3, 0, 2, 3, 800], 1024, width, skip=True)
    assert [group.rows for group in groups] == [[0], [5], [1, 4, 3]]
    assert [group.even for group in groups] == [True, True, False]
    # too little padding to pay for any call
    assert softmax_varlen.plan([128, 127], 128, width, skip=True) is None
    assert softmax_varlen.plan([10] * 256, 16, width, skip=True) is None


def loop_attention(q, k, v, q_ends, k_ends, max_q, max_k, *, window_size):
    """What ``varlen_attn`` documents, row by row; q, k, v ``(T, H, E)``."""
    assert q_ends.dtype == k_ends.dtype == torch.int32
    assert q.shape[-1] == v.shape[-1] == k.shape[-1]
    assert q.shape[-1] % 8 == 0
    parts = []
    for start, end, k_start, k_end in zip(q_ends, q_ends[1:], k_ends, k_ends[1:]):
        assert end - start <= max_q
        assert k_end - k_start <= max_k
        own = [x.transpose(0, 1).float() for x in (q[start:end], k[k_start:k_end], v[k_start:k_end])]
        scores = own[0] @ own[1].transpose(1, 2) * q.shape[-1] ** -0.5
        if window_size == (-1, 0):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        parts.append((scores.softmax(-1) @ own[2]).transpose(0, 1))
    return torch.cat(parts).to(q.dtype)


@pytest.mark.parametrize(("causal", "skip"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("widths", [(8, 8), (6, 12)], ids=str)
@pytest.mark.parametrize("holes", [False, True], ids=["suffix", "holes"])
def test_cuda_form_packs_and_unpacks(holes, widths, causal, skip, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_attention)
    q, k, v = cases.inputs(20, batch=3, width=widths[0], value_width=widths[1], dtype=torch.bfloat16)
    mask = cases.mask_with_holes(20, batch=3) if holes else lengths_mask([20, 7, 0], 20)
    options = {"key_mask": mask, "causal": causal, "skip_masked_queries": skip}
    assert softmax_varlen.varlen_refuses(q, k, v, **options) is None
    out = softmax_varlen.varlen(q, k, v, **options)
    want = softmax_attention(q, k, v, kernel="reference", **options)
    assert golden.error(out, want) < 1e-2
    for got, expected in zip(cases.gradients(out, (q, k, v)), cases.gradients(want, (q, k, v)), strict=True):
        assert golden.error(got, expected) < 2e-2


def test_cuda_form_says_what_it_refuses():
    q, k, v = cases.inputs(20, dtype=torch.bfloat16)
    mask = cases.mask_with_holes(20)
    options = {"key_mask": mask, "causal": False, "skip_masked_queries": False}
    refuses = softmax_varlen.varlen_refuses
    assert "fp16 and bf16" in refuses(q.float(), k, v, **options)
    assert "kernel=flash" in refuses(q, k, v, **options | {"key_mask": None})
    assert "skip_masked_queries" in refuses(q, k, v, **options | {"causal": True})
    assert softmax_varlen.varlen_missing() is None
    assert kernels.available("softmax_attention", "cuda") == ["flash", "varlen", "efficient", "reference"]
