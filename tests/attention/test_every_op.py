"""What holds for every op and each of its kernels on the CPU."""

import pytest
import torch

from attention import kernels
from tests.attention import cases

LENGTH = 33


def qkv(batch):
    return cases.inputs(LENGTH, batch=batch)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def favor(features):
    def run(q, k, v, **options):
        return kernels.favor_attention(q, k, v, normal(11, q.shape[-1]), features=features, **options)

    return run


def wkv4_inputs(batch):
    return [normal(6), normal(6, seed=1), normal(batch, LENGTH, 6, seed=2), normal(batch, LENGTH, 6, seed=3)]


def wkv7_inputs(batch):
    r, logw, k, v, a, b = (normal(batch, LENGTH, 2, 4, seed=seed) for seed in range(6))
    return [r, -logw.exp(), k, v, 0.3 * a, 0.3 * b]


def scan_inputs(batch):
    u, delta = (normal(batch, LENGTH, 6, seed=seed) for seed in range(2))
    B, C = (normal(batch, LENGTH, 4, seed=seed) for seed in (2, 3))
    return [u, delta, -normal(6, 4, seed=4).exp(), B, C, normal(6, seed=5)]


# name of the op, function, inputs for a batch size, options
OPS = {
    "softmax": ("softmax_attention", kernels.softmax_attention, qkv, {}),
    "softmax-causal": ("softmax_attention", kernels.softmax_attention, qkv, {"causal": True}),
    "linear": ("linear_attention", kernels.linear_attention, qkv, {}),
    "linear-causal": ("linear_attention", kernels.linear_attention, qkv, {"causal": True}),
    "favor": ("favor_attention", favor("positive"), qkv, {}),
    "favor-causal": ("favor_attention", favor("positive"), qkv, {"causal": True}),
    "favor-trig": ("favor_attention", favor("trig"), qkv, {}),
    "favor-trig-causal": ("favor_attention", favor("trig"), qkv, {"causal": True}),
    "wkv4": ("wkv4", kernels.wkv4, wkv4_inputs, {}),
    "wkv4-reverse": ("wkv4", kernels.wkv4, wkv4_inputs, {"reverse": True}),
    "wkv4-both": ("wkv4", kernels.wkv4, wkv4_inputs, {"bidirectional": True}),
    "wkv7": ("wkv7", kernels.wkv7, wkv7_inputs, {}),
    "scan": ("selective_scan", kernels.selective_scan, scan_inputs, {}),
}
CASES = [
    pytest.param(name, kernel, id=f"{name}-{kernel}")
    for name, (op, *_) in OPS.items()
    for kernel in kernels.available(op, "cpu")
    if not ("trig" in name and kernel == "cpp")
]
# whose gradient is written out; the others' comes from autograd, whose products follow the autocast around backward()
OWN_BACKWARD = {"favor_attention": {"cpp", "torch"}, "linear_attention": {"cpp"}, "wkv4": {"cpp", "torch"},
                "wkv7": {"cpp"}, "selective_scan": {"cpp", "torch"}, "softmax_attention": {"flash"}}  # fmt: skip


def flat(result):
    """The tensors of a result, nested or None in part."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else [x for part in result for x in flat(part)]


def call(name, kernel, batch=2, **options):
    """Inputs that require gradients, and all outputs."""
    _, function, make, own = OPS[name]
    tensors = [x.detach().requires_grad_() for x in make(batch)]
    return tensors, flat(function(*tensors, **own, **options, kernel=kernel))


def gradients(tensors, outputs):
    """Of a weighted sum of all outputs that have a gradient."""
    loss = sum((x * normal(*x.shape, seed=9)).sum() for x in outputs if x.requires_grad)
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_autocast_changes_no_bit(name, kernel):
    tensors, want = call(name, kernel)
    want_gradients = gradients(tensors, want)
    with torch.autocast("cpu", torch.bfloat16):
        tensors, found = call(name, kernel)
    assert all(map(torch.equal, found, want))
    assert all(map(torch.equal, gradients(tensors, found), want_gradients))


@pytest.mark.parametrize(
    ("name", "kernel"), [case for case in CASES if case.values[1] in OWN_BACKWARD[OPS[case.values[0]][0]]]
)
def test_autocast_around_a_backward_that_is_written_out_changes_no_bit(name, kernel):
    tensors, outputs = call(name, kernel)
    want = gradients(tensors, outputs)
    tensors, outputs = call(name, kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients(tensors, outputs), want))


@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_a_batch_without_rows_gives_none(name, kernel, masked):
    if masked and OPS[name][0] in ("wkv7", "selective_scan"):
        pytest.skip("takes no mask")
    options = {"key_mask": torch.ones(0, LENGTH, dtype=torch.bool)} if masked else {}
    _, outputs = call(name, kernel)
    tensors, empty = call(name, kernel, batch=0, **options)
    assert [x.shape[1:] for x in empty] == [x.shape[1:] for x in outputs]
    assert not any(len(x) for x in empty)
    for x, grad in zip(tensors, gradients(tensors, empty), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("length", [1, 2, 47, 131])
@pytest.mark.parametrize(("name", "kernel"), [case for case in CASES if "_attention" in OPS[case.values[0]][0]])
def test_one_visible_key_gives_its_value_and_no_gradient_to_q_and_k(name, kernel, length, scale):
    _, function, _, own = OPS[name]
    # the sum of trig features may lie near zero, where fp32 keeps three digits of the output
    dtype = torch.float64 if "trig" in name else torch.float32
    q, k, v = cases.inputs(length, batch=2, width=16, scale=scale, dtype=dtype)
    mask = torch.zeros(2, length, dtype=torch.bool)
    mask[:, length // 2] = True
    mask[1] = True  # an ordinary row beside it
    for key_mask in [mask] if length > 1 else [mask, None]:
        out = function(q, k, v, key_mask=key_mask, kernel=kernel, **own)
        first = length // 2 if own else 0
        alone = out[0, :, first:] if length > 1 else out
        value = v[0, :, length // 2, None] if length > 1 else v
        torch.testing.assert_close(alone, value.expand_as(alone), rtol=1e-5, atol=1e-6)
        given = normal(*out.shape).to(dtype)
        grad_q, grad_k, grad_v = torch.autograd.grad(out, (q, k, v), given)
        assert not (grad_q if length == 1 else grad_q[0]).any()
        assert not (grad_k if length == 1 else grad_k[0]).any()
        want = given[0, :, first:].sum(1)
        torch.testing.assert_close(grad_v[0, :, length // 2], want, rtol=1e-4, atol=1e-4)
        assert length == 1 or (grad_q[1].any() and grad_k[1].any())
