import threading

import pytest
import torch

from attention import kernels
from attention.kernels import dispatch

CPU = torch.device("cpu")


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(dispatch, "_OPS", {})
    monkeypatch.setattr(dispatch, "_used", threading.local())

    def fails(x, **_):
        raise RuntimeError("no")

    dispatch.register(
        "double",
        [
            dispatch.Kernel("gpu", lambda x, **_: 2 * x, devices=("cuda",)),
            dispatch.Kernel("absent", lambda x, **_: 2 * x, missing=lambda: "install double-ext"),
            dispatch.Kernel("even", lambda x, **_: 2 * x, refuses=lambda x, **_: "give even x" if x % 2 else None),
            dispatch.Kernel("plain", lambda x, **_: x + x),
            dispatch.Kernel("broken", fails),
        ],
    )
    return "double"


def test_auto_takes_the_first_that_can(op):
    assert dispatch.available(op, "cpu") == ["even", "plain", "broken"]
    assert dispatch.available(op, "cuda:0") == ["gpu", "even", "plain", "broken"]
    assert dispatch.call(op, "auto", CPU, 2) == 4
    assert dispatch.last_used(op) == "even"
    assert dispatch.call(op, "auto", CPU, 3) == 6
    assert dispatch.last_used(op) == "plain"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("gpu", "runs on cuda only"),
        ("absent", "install double-ext"),
        ("even", "give even x"),
        ("no", "even, plain"),
    ],
)
def test_named_kernel_that_cannot_run_says_what_to_change(op, kernel, message):
    with pytest.raises(ValueError, match=message):
        dispatch.call(op, kernel, CPU, 3)


def test_last_used_is_what_really_ran(op):
    with pytest.raises(ValueError, match="has not run in this thread yet; call it"):
        dispatch.last_used(op)
    dispatch.call(op, "plain", CPU, 1)
    with pytest.raises(RuntimeError):
        dispatch.call(op, "broken", CPU, 1)
    assert dispatch.last_used(op) == "plain"


def test_last_used_belongs_to_the_thread(op):
    dispatch.call(op, "plain", CPU, 1)
    seen = []

    def other():
        try:
            dispatch.last_used(op)
        except ValueError as error:
            seen.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(seen) == 1


def test_unknown_op_lists_the_ops(op):
    with pytest.raises(ValueError, match="'triple' is unknown; choose one of double"):
        dispatch.available("triple", "cpu")


def test_the_real_ops():
    for op in ("softmax_attention", "favor_attention", "linear_attention"):
        assert callable(getattr(kernels, op))
        names = kernels.available(op, "cpu")
        assert names[-1] == "reference"
        assert len(names) > 1
    on_gpu = kernels.available("softmax_attention", "cuda")
    assert [name for name in on_gpu if name != "varlen"] == ["flash", "efficient", "reference"]


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_unknown_device_lists_the_devices(device):
    with pytest.raises(ValueError, match=f"device '{device}' is unknown; kernels run on cpu . cuda"):
        kernels.available("wkv4", device)
    assert kernels.available("wkv4", "cpu:0") == kernels.available("wkv4", "cpu")
