"""WKV-4 for GPUs, in Triton: two-level scans over the length, forward and backward. Not yet run on a GPU.

Shapes: B batch, L sequence length, C channels, N chunks of T steps (N T >= L), W channels a program.

A program walks one chunk of W channels, step by step. Where B * C is too small to fill the device, a first pass
sums up every chunk on its own, a second one carries the sums from chunk to chunk, and the pass that writes the
results starts each chunk from there. T and L are ordinary arguments: no length is compiled in.

A sum is ``num e^scale`` with ``scale = ceil(max of its exponents)``: differences of integers are exact, so that
nothing piles up in the scale over a long sequence. The backward pass walks the other way, with D the denominator
and r = g / D (Peng et al. 2023, eq. 14, differentiated):

    R_i = sum_{t>i} e^{(t-1-i)w} r_t,   Q_i the same of r y,   R', Q' their derivatives by w
    gv_i = e^{k_i} (R_i + e^u r_i)               gk_i = e^{k_i} (v_i R_i - Q_i) + e^{u+k_i} r_i (v_i - y_i)
    gu = sum_i e^{u+k_i} r_i (v_i - y_i)         gw = sum_i e^{k_i} (v_i R'_i - Q'_i)

The state before the first token is one more term of the sums, the state after the last one more r.
"""

import importlib.util
import os

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from attention.kernels import dispatch
from attention.kernels.wkv4_scan import NEVER, State

WIDTH = 64
"""W: 64 bf16 channels are one 128-byte line."""
FILL = 2**18
"""Channels in flight that keep a large GPU's memory busy: about 132 multiprocessors of 2048 threads."""
MIN_STEPS = 32
"""Shorter chunks would spend more on the carries than they gain."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def chunk_steps(batch: int, length: int, channels: int) -> int:
    """T: the whole length if B * C fills the device, else as much less as it takes."""
    chunks = min(-(-FILL // (batch * channels)), -(-length // MIN_STEPS))
    return -(-length // chunks)


class _Grid:
    """Launch parameters that both directions share."""

    def __init__(self, k: Tensor) -> None:
        self.batch, self.length, self.channels = k.shape
        self.steps = chunk_steps(*k.shape)
        self.chunks = -(-self.length // self.steps)
        self.width = min(WIDTH, 1 << (self.channels - 1).bit_length())
        self.sizes = (self.channels, self.length, self.steps, self.chunks, NEVER)

    def launch(self, kernel: object, rows: int, *args: object, **flags: bool) -> None:
        blocks = -(-self.channels // self.width)
        with torch.cuda.device_of(args[0]):
            kernel[(rows, blocks)](*args, *self.sizes, **flags, W=self.width, num_warps=max(1, self.width // 32))

    def scan(self, walk: object, carry: object, tensors: tuple, edge: Tensor, outputs: tuple) -> Tensor:
        """Results of ``walk`` into ``outputs``; from the sums at one edge ``(planes, B, C)`` to those at the other."""
        last, rows = torch.empty_like(edge), self.batch * self.chunks
        if self.chunks == 1:
            self.launch(walk, rows, *tensors, edge, last, *outputs, EMIT=True, CARRIED=False)
            return last
        sums = edge.new_empty(edge.shape[0], rows, self.channels)
        self.launch(walk, rows, *tensors, edge, sums, *outputs, EMIT=False, CARRIED=False)
        self.launch(carry, self.batch, tensors[0], sums, edge, last)
        self.launch(walk, rows, *tensors, sums, last, *outputs, EMIT=True, CARRIED=True)
        return last


class _WKV4(torch.autograd.Function):
    """``(time_decay, u, k, v, num, den, scale, key_mask) -> (y, num, den, scale)``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        decay: Tensor,
        u: Tensor,
        k: Tensor,
        v: Tensor,
        num: Tensor,
        den: Tensor,
        scale: Tensor,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, ...]:
        decay, u, k, v = (x.contiguous() for x in (decay, u, k, v))
        from attention.kernels import wkv4_triton_programs as programs

        y, log_den = torch.empty_like(k), torch.empty_like(k, dtype=torch.float32)
        start = torch.stack([num, den, scale])
        end = _Grid(k).scan(programs.forward, programs.carry, (decay, u, k, v), start, (y, log_den))
        if key_mask is not None:
            log_den.masked_fill_(~key_mask[..., None], torch.inf)  # no gradient comes back from a masked query
        end = [part.clone() for part in end]
        ctx.save_for_backward(decay, u, k, v, y, log_den, start, end[2])
        ctx.mark_non_differentiable(end[2])
        return y, *end

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor, grad_num: Tensor, grad_den: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        decay, u, k, v, y, log_den, start, end_scale = ctx.saved_tensors
        from attention.kernels import wkv4_triton_programs as programs

        grid = _Grid(k)
        zero = torch.zeros_like(grad_num)
        # the gradients of the true sums are those of num and den times e^-scale
        edge = torch.stack([grad_num, -grad_den, zero, zero, -end_scale])
        edge[4].masked_fill_(end_scale == NEVER, NEVER)
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        grad_w, grad_u = start.new_empty(2, grid.batch * grid.chunks, grid.channels)
        tensors = (decay, u, k, v, y, log_den, grad.contiguous())
        ends = grid.scan(programs.backward, programs.carry_back, tensors, edge, (grad_k, grad_v, grad_w, grad_u))
        num, den, scale = start
        r_sum, q_sum, r_slope, q_slope = ends[:4] * (ends[4] + scale).exp()
        slope = grad_w.sum(0) + (num * r_slope - den * q_slope).sum(0)
        grad_decay = slope * -decay.float().exp()
        return grad_decay.to(decay.dtype), grad_u.sum(0).to(u.dtype), grad_k, grad_v, r_sum, -q_sum, None, None


def _run(
    time_decay: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    state: State | None,
    bidirectional: bool,
) -> tuple[Tensor, State]:
    """The "triton" kernel of ``wkv4``; masked keys are -inf already."""
    if state is None:
        zero = k.new_zeros(k.shape[0], k.shape[2], dtype=torch.float32)
        state = zero, zero, torch.full_like(zero, NEVER)
    num, den, scale = (part.float() for part in state)
    y, *end = _WKV4.apply(time_decay, u, k, v, num, den, scale.detach(), key_mask)
    return y, tuple(end)


def _missing() -> str | None:
    return None if importlib.util.find_spec("triton") else "Triton is not installed; pip install triton"


def _refuses(time_decay: Tensor, u: Tensor, k: Tensor, v: Tensor, *, bidirectional: bool, **_: object) -> str | None:
    if bidirectional:
        return "it scans in one direction; use attention.kernel=torch"
    if k.dtype == torch.float64:
        return "its sums are fp32; use attention.kernel=torch"
    return None


KERNEL = dispatch.Kernel(
    "triton", _run, devices=("cuda", "cpu") if INTERPRETED else ("cuda",), missing=_missing, refuses=_refuses
)
"""Runs on CPU tensors too, slowly, where TRITON_INTERPRET=1 was set before the import."""
