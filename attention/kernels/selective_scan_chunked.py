"""The selective scan in plain torch, segment by segment, with its gradient written out.

Shapes: B batch, L sequence length, D channels, N states, S steps a segment.

Only one segment's states ``(S, B, D, N)`` exist at a time. The forward pass keeps the state at each segment's start;
the backward pass takes the segments in reverse and computes each again from there. Within a segment all but one
multiply-add a step is done for all steps at once. With g_t the gradient of C_t . h_t, the gradient of h_t is

    G_t = g_t C_t + e^{dt_{t+1} A} G_{t+1}      gC_t = sum_d g_t h_t      gB_t = sum_d G_t dt_t u_t
    g(dt u)_t = G_t . B_t      g(dt A)_t = G_t e^{dt_t A} h_{t-1}
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu, softplus

SEGMENT = 2**19
"""Numbers that a segment's states should hold: enough to hide the cost of a call, few enough for a cache."""


def selective_scan_chunked(
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
    """As ``attention.kernels.selective_scan``."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    given = (u, delta, A, B, C, D, z, delta_bias, state)
    u_, delta, A, B, C, D, z, delta_bias, state = (None if x is None else x.to(dtype) for x in given)
    dt = softplus(delta if delta_bias is None else delta + delta_bias)
    if state is None:
        state = u_.new_zeros(u.shape[0], *A.shape)
    y, end = _Scan.apply(dt, dt * u_, A, B, C, state)
    if D is not None:
        y = y + D * u_
    if z is not None:
        y = y * silu(z)
    return y.to(u.dtype), end


def _segments(length: int, state: Tensor) -> list[slice]:
    """Slices of the length; not shorter than its root, or the kept states would outweigh a segment's."""
    steps = max(math.isqrt(length), SEGMENT // max(state.numel(), 1), 1)
    return [slice(start, min(start + steps, length)) for start in range(0, length, steps)]


def _decays(dt: Tensor, A: Tensor) -> Tensor:
    """``e^{dt A}``: ``dt (S, B, D)`` -> ``(S, B, D, N)``."""
    return torch.mul(dt[..., None], A).exp_()


def _states(decay: Tensor, x: Tensor, B: Tensor, h: Tensor) -> Tensor:
    """States after each step: ``decay (S, B, D, N)``, ``x (S, B, D)``, ``B (S, B, N)`` -> ``(S, B, D, N)``."""
    states = x[..., None] * B[:, :, None]
    for now, decay_t in zip(states.unbind(0), decay.unbind(0)):
        h = now.addcmul_(decay_t, h)
    return states


class _Scan(torch.autograd.Function):
    """``(dt, x = dt u, A, B, C, state) -> (y = C . h, end state)``."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor
    ) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        segments = _segments(x.shape[1], h)
        starts = h.new_empty(len(segments), *h.shape) if any(ctx.needs_input_grad) else None
        for i, part in enumerate(segments):
            if starts is not None:
                starts[i] = h
            dt_, x_, B_, C_ = (t[:, part].transpose(0, 1) for t in (dt, x, B, C))
            states = _states(_decays(dt_, A), x_, B_, h)
            y[:, part] = torch.matmul(states, C_[..., None]).squeeze(-1).transpose(0, 1)
            h = states[-1]
        ctx.save_for_backward(dt, x, A, B, C, starts)
        return y, h.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad_y: Tensor, grad_end: Tensor) -> tuple[Tensor, ...]:
        dt, x, A, B, C, starts = ctx.saved_tensors
        with torch.autocast(grad_y.device.type, enabled=False):
            grad_dt, grad_x, grad_B, grad_C = (torch.empty_like(t) for t in (dt, x, B, C))
            grad_A, grad_h = torch.zeros_like(A), grad_end
            for start, part in reversed(list(zip(starts, _segments(x.shape[1], grad_end)))):
                g, dt_, x_, B_, C_ = (t[:, part].transpose(0, 1) for t in (grad_y, dt, x, B, C))
                decay = _decays(dt_, A)
                states = _states(decay, x_, B_, start)
                grad_C[:, part] = torch.matmul(g[:, :, None], states).squeeze(2).transpose(0, 1)
                grads = g[..., None] * C_[:, :, None]
                for now, decay_t in zip(reversed(grads.unbind(0)), reversed(decay.unbind(0))):
                    grad_h = now.add_(grad_h).mul(decay_t)
                grad_B[:, part] = torch.matmul(x_[:, :, None], grads).squeeze(2).transpose(0, 1)
                grad_x[:, part] = torch.matmul(grads, B_[..., None]).squeeze(-1).transpose(0, 1)
                # now the gradient of dt A
                decay.mul_(grads)
                decay[1:] *= states[:-1]
                decay[0] *= start
                grad_dt[:, part] = (decay * A).sum(-1).transpose(0, 1)
                grad_A += torch.einsum("sbd,sbdn->dn", dt_, decay)
            return grad_dt, grad_x, grad_A, grad_B, grad_C, grad_h
