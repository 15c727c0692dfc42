"""Inputs and checks that the tests of all attention ops share."""

import pytest
import torch

from attention import kernels

LENGTHS = (1, 2, 63, 100, 257)
MODES = ("bidir", "causal", "mask", "causal_mask")
POISON = (float("nan"), float("inf"), 1e4)


def op_kernels(op):
    """Every kernel of ``op`` that runs here."""
    return kernels.available(op, "cpu")


def require(kernel, *, dtype=torch.float32, features="positive"):
    """Skip what the C++ kernels of this package leave to the others."""
    if kernel == "cpp" and (dtype == torch.float64 or features == "trig"):
        pytest.skip("the cpp kernel computes in fp32, without trig features")


def inputs(length, *, batch=2, heads=2, width=8, value_width=8, dtype=torch.float32, scale=1.0, seed=0):
    """q, k, v that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    widths = (width, width, value_width)
    return [
        (torch.randn(batch, heads, length, w, generator=generator, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_()
        for w in widths
    ]


def mask_with_holes(length, batch=2):
    """Row 0: every third key hidden, the first included; the last row sees no key at all."""
    mask = torch.arange(length).remainder(3).ne(0).repeat(batch, 1)
    mask[-1] = False
    return mask


def gradients(out, tensors):
    """Gradients of a weighted sum of ``out``."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).sin() + 0.3
    return torch.autograd.grad(out, tensors, weights.to(out.dtype))


def assert_remedy(error):
    """The message ends with what to do, after what there was or what is wrong."""
    wrong, _, remedy = str(error).rpartition("; ")
    assert wrong
    assert not remedy.startswith("got")


def check_poison(op, poison):
    """What masked k and v hold changes nothing, bit for bit, forward or backward."""
    for causal in (False, True):
        q, k, v = inputs(70)
        mask = mask_with_holes(70)
        hidden = ~mask[:, None, :, None].expand_as(k)
        with torch.no_grad():
            bad_k, bad_v = k.masked_fill(hidden, poison), v.masked_fill(hidden, poison)
        bad_k.requires_grad_(), bad_v.requires_grad_()
        want = op(q, k, v, key_mask=mask, causal=causal)
        got = op(q, bad_k, bad_v, key_mask=mask, causal=causal)
        assert torch.equal(got, want)
        for a, b in zip(gradients(got, (q, bad_k, bad_v)), gradients(want, (q, k, v)), strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()
        assert not gradients(op(q, bad_k, bad_v, key_mask=mask, causal=causal), (bad_k,))[0][hidden].any()


def check_no_key(op):
    """A query without a key: zeros, and zero gradients."""
    q, k, v = inputs(70)
    out = op(q, k, v, key_mask=mask_with_holes(70), causal=True)
    assert not out[1].any()
    assert not out[0, :, 0].any()
    assert out[0, :, 1:].abs().sum(-1).all()
    for grad in gradients(out, (q, k, v)):
        assert grad.isfinite().all()
        assert not grad[1].any()


def check_future(op, *, atol):
    """Changing token t, even to a huge value, changes nothing before t."""
    q, k, v = inputs(150)
    want = op(q, k, v, causal=True)
    for t, value in ((1, 3.0), (70, 50.0), (149, -20.0)):
        with torch.no_grad():
            others = [x.clone() for x in (q, k, v)]
            for x in others:
                x[:, :, t] = value
            got = op(*others, causal=True)
        torch.testing.assert_close(got[:, :, :t], want[:, :, :t], rtol=0, atol=atol)
        assert (got[:, :, t] - want[:, :, t]).abs().max() > 1e-3


def saved_bytes(op, tensors):
    """Bytes that autograd keeps for the backward pass, every storage counted once."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = op(*tensors)
    assert out.requires_grad
    return sum(storages.values())
