"""The contract of every mixer in the registry, whatever it is."""

from dataclasses import fields

import pytest
import torch

import attention
from attention import kernels

WIDTH = 16
NAMES = list(attention.REGISTRY)
STREAMING = [name for name in NAMES if attention.load(name).streaming]
MODES = [
    pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'bidir'}")
    for name in NAMES
    for causal in (False, True)
    if (attention.load(name).causal if causal else attention.load(name).bidirectional)
]
POISON = [float("nan"), float("inf"), 1e4]


def build(name, causal=False, **options):
    """The mixer with random weights everywhere, so that no parameter hides behind a zero."""
    config = attention.load(name).Config(causal=causal)
    assert config.name == name
    if any(field.name == "num_heads" for field in fields(config)):
        config.num_heads = 2
    for key, value in options.items():
        setattr(config, key, value)
    mixer = attention.build(config, WIDTH, layer=1, num_layers=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return mixer


def tokens(batch, length, seed=1):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def parameter_gradients(mixer, out, mask=None):
    """Gradients of a weighted sum of the outputs at real tokens."""
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).sin() + 0.2
    if mask is not None:
        out = out.masked_fill(~mask[..., None], 0.0)
    return torch.autograd.grad((out * weights).sum(), list(mixer.parameters()))


@pytest.mark.parametrize("length", [1, 2, 63, 100, 257])
@pytest.mark.parametrize(("name", "causal"), MODES)
def test_shape(name, causal, length):
    mixer = build(name, causal)
    out = mixer(tokens(2, length))
    assert out.shape == (2, length, WIDTH)
    assert out.isfinite().all()
    assert kernels.last_used(mixer.op) in kernels.available(mixer.op, "cpu")


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("name", "causal"), MODES)
def test_padding_is_never_read(name, causal, poison):
    mixer = build(name, causal)
    mask = torch.ones(3, 37, dtype=torch.bool)
    mask[1, 20:] = False
    mask[2, 1:] = False
    clean = tokens(3, 37).requires_grad_()
    dirty = clean.detach().masked_fill(~mask[..., None], poison).requires_grad_()
    want, got = mixer(clean, mask), mixer(dirty, mask)
    assert got.isfinite().all()
    torch.testing.assert_close(got[mask], want[mask], rtol=0, atol=1e-6)
    for a, b in zip(parameter_gradients(mixer, got, mask), parameter_gradients(mixer, want, mask), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    grad = torch.autograd.grad(mixer(dirty, mask)[mask].sum(), dirty)[0]
    assert grad.isfinite().all()
    assert not grad[~mask].any()


@pytest.mark.parametrize(("name", "causal"), MODES)
def test_padded_batch_equals_single_rows(name, causal):
    mixer = build(name, causal)
    x, lengths = tokens(4, 50), [50, 33, 7, 1]
    mask = torch.arange(50) < torch.tensor(lengths)[:, None]
    out = mixer(x, mask)
    for row, length in enumerate(lengths):
        alone = mixer(x[row : row + 1, :length])
        torch.testing.assert_close(out[row, :length], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_row_without_any_token_is_finite(name):
    out = build(name)(tokens(2, 9), torch.tensor([[True] * 9, [False] * 9]))
    assert out.isfinite().all()


@pytest.mark.parametrize(("name", "causal"), MODES)
def test_causal_flag(name, causal):
    mixer = build(name, causal)
    x = tokens(2, 90)
    changed = x.clone()
    changed[:, 70:] += 1.0
    before, after = mixer(x)[:, :70], mixer(changed)[:, :70]
    if causal:
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    else:
        assert (after - before).abs().max() > 1e-4


@pytest.mark.parametrize(("name", "causal"), MODES)
def test_gradient_reaches_every_parameter(name, causal):
    mixer = build(name, causal)
    for (key, _), grad in zip(mixer.named_parameters(), parameter_gradients(mixer, mixer(tokens(2, 40))), strict=True):
        assert grad.isfinite().all(), key
        assert grad.abs().max() > 0, key


@pytest.mark.parametrize(("name", "causal"), MODES)
def test_bf16(name, causal):
    mixer, x = build(name, causal), tokens(2, 65)
    want = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixer(x)
    assert (out.float() - want).abs().max() < 0.1 * want.abs().max()
    grads = parameter_gradients(mixer, out.float())
    assert all(grad.isfinite().all() for grad in grads)


def parts(state):
    """The tensors of a state, which a mixer may nest as it likes."""
    return [state] if isinstance(state, torch.Tensor) else [tensor for part in state for tensor in parts(part)]


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in STREAMING), ("performer", {"features": "hyperbolic"})],
    ids=[*STREAMING, "performer-hyperbolic"],
)
def test_steps_equal_the_causal_forward_with_a_state_of_one_size(name, options):
    mixer, x = build(name, causal=True, **options), tokens(2, 4096)
    state, outputs = mixer.init_state(2), []
    sizes = [part.numel() for part in parts(state)]
    with torch.no_grad():
        for x_t in x.unbind(1):
            y_t, state = mixer.step(x_t, state)
            outputs.append(y_t)
        want = mixer(x)
    assert (torch.stack(outputs, 1) - want).abs().max() < 1e-5 * want.abs().max()
    assert [part.numel() for part in parts(state)] == sizes
    assert all(part.dtype == torch.float32 for part in parts(state))


@pytest.mark.parametrize(("first", "last"), [(20, 0), (0, 20)], ids=["falling", "rising"])
def test_performer_streams_whatever_the_norms(first, last):
    mixer = build("performer", causal=True)
    x = tokens(2, 60) * torch.linspace(first, last, 60)[:, None]
    state, outputs = mixer.init_state(2), []
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, state)
        outputs.append(y_t)
    want = mixer(x)
    assert want.isfinite().all()
    # exponents of some hundreds in fp32
    assert (torch.stack(outputs, 1) - want).abs().max() < 1e-3 * want.abs().max()


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_streams_in_bf16_sum_in_fp32(name):
    mixer = build(name, causal=True).bfloat16()
    y, state = mixer.step(tokens(2, 1)[:, 0].bfloat16(), mixer.init_state(2))
    assert y.dtype == torch.bfloat16
    assert all(part.dtype == torch.float32 for part in state)


@pytest.mark.parametrize("name", STREAMING)
def test_bidirectional_mixers_refuse_to_stream(name):
    mixer = build(name)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        mixer.init_state(1)
    with pytest.raises(ValueError, match=r"attention\.causal=true"):
        mixer.step(tokens(1, 1)[:, 0], ())


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_reproduces_the_output(name):
    first, second = build(name), build(name, **({"projection_seed": 7} if name == "performer" else {}))
    second.load_state_dict(first.state_dict())
    x = tokens(2, 20)
    assert torch.equal(first(x), second(x))
    assert torch.equal(first(x), first(x))


@pytest.mark.parametrize("name", NAMES)
def test_heads_that_do_not_divide_the_width(name):
    if not any(field.name == "num_heads" for field in fields(attention.load(name).Config)):
        return
    with pytest.raises(ValueError, match=r"model\.num_heads=3 does not divide model\.width=16; use one of"):
        build(name, num_heads=3)


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="softmax, flash, performer"):
        attention.load("perfomer")


def test_softmax_and_flash_are_one_function():
    x, mask = tokens(2, 40), torch.arange(40) < torch.tensor([[40], [11]])
    for causal in (False, True):
        materialised, flash = build("softmax", causal), build("flash", causal)
        torch.testing.assert_close(flash(x, mask), materialised(x, mask), rtol=1e-5, atol=1e-6)
        assert kernels.last_used("softmax_attention") == "reference"


def test_performer_redraw():
    mixer, same = build("performer", redraw_interval=2), build("performer", redraw_interval=2)
    first = mixer.projection.clone()
    mixer.before_step(1)
    assert torch.equal(mixer.projection, first)
    mixer.before_step(2)
    assert not torch.equal(mixer.projection, first)
    # a resumed run needs no history, and global random state plays no part
    torch.manual_seed(5)
    same.before_step(2)
    assert torch.equal(mixer.projection, same.projection)
    mixer.before_step(4)
    assert not torch.equal(mixer.projection, same.projection)
    kept = build("performer")
    kept.before_step(2)
    assert torch.equal(kept.projection, first)
    config = attention.load("performer").Config(num_heads=2)
    other_layer = attention.build(config, WIDTH, layer=2, num_layers=3)
    assert not torch.equal(other_layer.projection, first)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"features": "relu"}, r"attention\.features='relu'"),
        ({"projection": "qr"}, r"attention\.projection='qr'"),
        ({"num_features": -1}, r"attention\.num_features=-1"),
        ({"redraw_interval": -1}, r"attention\.redraw_interval=-1"),
    ],
)
def test_performer_options(option, message):
    with pytest.raises(ValueError, match=message):
        build("performer", **option)


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(5, WIDTH), None, "x .B, L, 16.*got torch.float32 .5, 16.*give"),
        (torch.zeros(2, 5, 3), None, "got torch.float32 .2, 5, 3"),
        (torch.zeros(2, 0, WIDTH), None, "L > 0; got torch.float32 .2, 0, 16"),
        (torch.zeros(2, 5, WIDTH, dtype=torch.int64), None, "got torch.int64"),
        (torch.zeros(2, 5, WIDTH), torch.ones(2, 5), "bool key_mask .2, 5.*got torch.float32.*[.]bool"),
        (torch.zeros(2, 5, WIDTH), torch.ones(2, 4, dtype=torch.bool), "got torch.bool .2, 4"),
        (torch.zeros(2, 5, WIDTH), torch.ones(2, 5, device="meta").bool(), "key_mask on meta; give key_mask.to"),
        (torch.zeros(2, 5, WIDTH, device="meta"), None, "weight is on cpu, x on meta; give x.to"),
        (torch.zeros(2, 5, WIDTH), [[True] * 5] * 2, "key_mask must be a tensor; got list; give"),
        (torch.zeros(2, 5, WIDTH).half(), None, r"takes x in torch.float32; got torch.float16; give .* or .*autocast"),
    ],
    ids=["rank", "width", "no-token", "integers", "float-mask", "mask-shape", "mask-device", "device", "list", "fp16"],
)
@pytest.mark.parametrize(("name", "causal"), MODES)
def test_wrong_input_is_one_value_error(name, causal, x, mask, message):
    mixer = build(name, causal)
    modules = [mixer, mixer.native_channel_mixer()]
    for module in modules:
        if module is not None and list(module.parameters()):
            with pytest.raises(ValueError, match=message):
                module(x, mask)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 1, WIDTH), "one token a row.*got torch.float32 .2, 1, 16.*give x"),
        (torch.zeros(2, 3), "one token a row"),
        (torch.zeros(2, WIDTH).long(), "got torch.int64; give x.float"),
        (torch.zeros(2, WIDTH).half(), "takes x in torch.float32; got torch.float16; give"),
    ],
    ids=["rank", "width", "integers", "fp16"],
)
@pytest.mark.parametrize("name", STREAMING)
def test_a_wrong_token_of_a_stream_is_one_value_error(name, x, message):
    mixer = build(name, causal=True)
    for module in (mixer, mixer.native_channel_mixer()):
        if module is not None and list(module.parameters()):
            state = module.init_state(2)
            with pytest.raises(ValueError, match=message):
                module.step(x, state)


@pytest.mark.parametrize("name", STREAMING)
def test_streams_under_autocast(name):
    mixer, x = build(name, causal=True), tokens(2, 12)
    want = mixer(x)
    state, outputs = mixer.init_state(2), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x_t in x.unbind(1):
            y_t, state = mixer.step(x_t, state)
            outputs.append(y_t)
    assert (torch.stack(outputs, 1).float() - want).abs().max() < 0.1 * want.abs().max()


AUTOCAST_KERNELS = [
    pytest.param(name, kernel, id=f"{name}-{kernel}")
    for name in NAMES
    for kernel in kernels.available(attention.load(name).op, "cpu")
]


@pytest.mark.parametrize(("name", "kernel"), AUTOCAST_KERNELS)
def test_an_op_computes_in_the_dtype_of_its_inputs_under_autocast(monkeypatch, name, kernel):
    """The op alone: what autocast does to the projections around it is its own affair."""
    mixer = build(name, kernel=kernel)
    seen = []
    call = kernels.dispatch.call

    def noted(*args, **kwargs):
        seen.append((args, kwargs))
        return call(*args, **kwargs)

    monkeypatch.setattr(kernels.dispatch, "call", noted)
    mixer(tokens(2, 33))
    monkeypatch.undo()
    for args, kwargs in seen:
        exact = call(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            found = call(*args, **kwargs)
        exact, found = (out[0] if isinstance(out, tuple) else out for out in (exact, found))
        assert torch.equal(found, exact)
    assert seen


@pytest.mark.parametrize(("name", "causal"), MODES)
def test_no_row_at_all_gives_no_row(name, causal):
    mixer = build(name, causal)
    for mask in (None, torch.ones(0, 5, dtype=torch.bool)):
        out = mixer(tokens(0, 5), mask)
        assert out.shape == (0, 5, WIDTH)
        assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), list(mixer.parameters())))


@pytest.mark.parametrize("kernel", kernels.available("wkv4", "cpu"))
@pytest.mark.parametrize("bidirectional", [False, True])
def test_wkv4_of_no_row(kernel, bidirectional):
    nothing = torch.zeros(0, 5, 4)
    y, _ = kernels.wkv4(torch.zeros(4), torch.zeros(4), nothing, nothing, bidirectional=bidirectional, kernel=kernel)
    assert y.shape == (0, 5, 4)
