"""The selective scan op: a linear recurrence whose step, input and readout depend on the token.

Shapes: B batch, L sequence length, D channels, N states a channel.

Mamba's S6 (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", algorithm 2), with a
diagonal real A, zero-order hold on A and an Euler step on B:

    dt = softplus(delta + delta_bias)    h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t
    y_t = (C_t . h_t + D u_t) silu(z_t)

To add a kernel, put it into the list at the end of this file.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from attention.kernels import dispatch, selective_scan_native
from attention.kernels.inputs import check_tensors
from attention.kernels.selective_scan_chunked import selective_scan_chunked


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    state: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S6: ``u, delta, z (B, L, D)``, ``A (D, N)``, ``B, C (B, L, N)``, ``D, delta_bias (D)`` -> ``y (B, L, D)`` and h.

    h, the state after the last token, is ``(B, D, N)`` in fp32 (fp64 for fp64 input), like all sums; y has u's
    dtype. ``state`` starts the scan where an earlier call ended; gradients flow through both. Without ``D`` there
    is no skip, without ``z`` no gate.

    There is no mask: a position with u = 0 and delta = -inf leaves the state exactly as it was.
    """
    _check(u, delta, A, B, C, D, z, delta_bias, state)
    options = {"z": z, "delta_bias": delta_bias, "state": state}
    return dispatch.call("selective_scan", kernel, u.device, u, delta, A, B, C, D, **options)


def _reference(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    *,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Token by token, gradients by autograd."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    given = (u, delta, A, B, C, D, z, delta_bias, state)
    u_, delta, A, B, C, D, z, delta_bias, h = (None if x is None else x.to(dtype) for x in given)
    dt = softplus(delta if delta_bias is None else delta + delta_bias)
    if h is None:
        h = u_.new_zeros(u.shape[0], *A.shape)
    outputs = []
    # unbind: indexing x[:, t] in the loop would make the backward quadratic
    for u_t, dt_t, B_t, C_t in zip(u_.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1)):
        h = (dt_t[..., None] * A).exp() * h + (dt_t * u_t)[..., None] * B_t[:, None]
        outputs.append((h * C_t[:, None]).sum(-1))
    y = torch.stack(outputs, 1)
    if D is not None:
        y = y + D * u_
    if z is not None:
        y = y * silu(z)
    return y.to(u.dtype), h


@cache
def _mamba_ssm_missing() -> str | None:
    try:
        import mamba_ssm.ops.selective_scan_interface  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install mamba-ssm causal-conv1d"
    return None


def _mamba_ssm_refuses(u: Tensor, *tensors: Tensor, state: Tensor | None, **options: Tensor | None) -> str | None:
    if state is not None:
        return "it starts without a state; use state=None or attention.kernel=torch"
    return "it has no fp64; use attention.kernel=torch" if u.dtype == torch.float64 else None


def _mamba_ssm(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    *,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: None,
) -> tuple[Tensor, Tensor]:
    """The authors' CUDA kernel, which takes the length last and passes no gradient through the end state."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    sequences = [None if x is None else x.to(u.dtype).transpose(1, 2).contiguous() for x in (u, delta, B, C, z)]
    A, D, delta_bias = (None if x is None else x.float().contiguous() for x in (A, D, delta_bias))
    u_, delta, B, C, z = sequences
    y, end = selective_scan_fn(u_, delta, A, B, C, D, z, delta_bias, delta_softplus=True, return_last_state=True)
    return y.transpose(1, 2), end.float().detach()


def _check(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    state: Tensor | None,
) -> None:
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "state": state}
    check_tensors("selective_scan", **tensors)
    if u.dim() != 3 or 0 in u.shape[1:]:
        raise ValueError(
            f"selective_scan: u must be (B, L, D) with L, D > 0; got {tuple(u.shape)}; leave out calls without a token"
        )
    batch, length, channels = u.shape
    if A.dim() != 2 or A.shape[0] != channels or not A.shape[1]:
        raise ValueError(
            f"selective_scan: A must be ({channels}, N), a row a channel of u; got {tuple(A.shape)}; transpose it?"
        )
    states = A.shape[1]
    wanted = {
        "delta": (delta, (batch, length, channels)),
        "B": (B, (batch, length, states)),
        "C": (C, (batch, length, states)),
        "D": (D, (channels,)),
        "z": (z, (batch, length, channels)),
        "delta_bias": (delta_bias, (channels,)),
        "state": (state, (batch, channels, states)),
    }
    for name, (given, shape) in wanted.items():
        if given is not None and given.shape != shape:
            raise ValueError(
                f"selective_scan: {name} must be {shape} beside this u and A; got {tuple(given.shape)}; no dimension "
                "is broadcast"
            )


dispatch.register(
    "selective_scan",
    [
        dispatch.Kernel(
            "mamba_ssm", _mamba_ssm, devices=("cuda",), missing=_mamba_ssm_missing, refuses=_mamba_ssm_refuses
        ),
        dispatch.Kernel(
            "cpp",
            selective_scan_native.selective_scan_native,
            devices=("cpu",),
            missing=selective_scan_native.missing,
            refuses=selective_scan_native.refuses,
        ),
        dispatch.Kernel("torch", selective_scan_chunked),
        dispatch.Kernel("reference", _reference),
    ],
)
