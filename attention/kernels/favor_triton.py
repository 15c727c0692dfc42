"""FAVOR+ for GPUs, fused in Triton: no feature ever reaches memory. Not yet run on a GPU.

Shapes: N = B * H sequences, L length, E head width, V value width, F features; q and k ``(N, L, E)``,
v ``(N, L, V)``, rows ``(F, E)`` scaled so that ``w_r.x' = rows @ x``.

Bidirectional, positive and hyperbolic features. Keys are summed up feature by feature with a running maximum
``top_r`` of their exponents ``a_jr = w_r.k'_j - |k'_j|^2 / 2``; queries then meet those sums the way
FlashAttention's queries meet keys, with a running row maximum:

    S_r = sum_j e^{a_jr - top_r} v_j,   z_r = sum_j e^{a_jr - top_r}
    P_ir = e^{w_r.q'_i + top_r} / sum_r e^{w_r.q'_i + top_r} z_r,   out_i = sum_r P_ir S_r

Backward keeps the inputs, the output, its log denominator, S and z. With g the gradient and ``delta_i = g_i.out_i``:

    dS_r = sum_i P_ir g_i,   dz_r = -sum_i P_ir delta_i,   dq_i = sum_r P_ir (g_i.S_r - delta_i z_r) w_r
    da_jr = e^{a_jr - top_r} (v_j.dS_r + dz_r),   dv_j = sum_r e^{a_jr - top_r} dS_r,   dk_j = sum_r da_jr (w_r - k'_j)

Exponents are fp32 in any dtype: "ieee" products for fp32 inputs, three tf32 products for 16-bit inputs, whose
sums are single tf32 products.
"""

import importlib.util
import os

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from attention.kernels import dispatch
from attention.kernels.wkv4_scan import NEVER

SIGNS = {"positive": (1,), "hyperbolic": (1, -1)}
TOKENS = 64
"""BT, tokens a program holds."""
FEATURES = 64
"""BF, features a program holds."""
FILL = 512
"""Programs that keep a large GPU busy; L is split until the sums over keys have that many."""
MAX_WIDTH = 128
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _Launch:
    """Sizes and launch parameters of one call."""

    def __init__(self, q: Tensor, v: Tensor, rows: Tensor, heads: int) -> None:
        self.count, self.length, self.width = q.shape
        self.value_width, self.features, self.heads = v.shape[-1], rows.shape[0], heads
        self.half_root = self.width**-0.5 / 2  # |x'|^2 / 2 = |x|^2 * half_root
        blocks = self.count * -(-self.features // FEATURES)
        tiles = -(-self.length // TOKENS)
        self.span = -(-tiles // max(1, min(tiles, FILL // blocks))) * TOKENS
        self.splits = -(-self.length // self.span)
        half = q.dtype != torch.float32
        self.flags = {
            "BT": TOKENS,
            "BF": FEATURES,
            "BE": max(16, 1 << (self.width - 1).bit_length()),
            "BV": max(16, 1 << (self.value_width - 1).bit_length()),
            "PRECISION": "tf32x3" if half else "ieee",
            "SUM_PRECISION": "tf32" if half else "ieee",
        }
        self.device = q.device

    def over_features(self, kernel: object, *args: object, **flags: bool) -> None:
        """A program for every sequence, split and block of features."""
        self._run(kernel, (self.count * self.splits, -(-self.features // FEATURES)), args, flags)

    def over_tokens(self, kernel: object, *args: object, **flags: bool) -> None:
        """A program for every sequence and block of tokens."""
        self._run(kernel, (self.count, -(-self.length // TOKENS)), args, flags)

    def _run(self, kernel: object, grid: tuple[int, int], args: tuple, flags: dict) -> None:
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **flags, **self.flags, num_warps=4)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Room for every split's sums ``(N, S, F, V)`` and denominators ``(N, S, F)``."""
        shape = (self.count, self.splits, self.features)
        sums = torch.empty(*shape, self.value_width, device=self.device)
        return sums, torch.empty(shape, device=self.device)


def _key_sums(
    launch: _Launch, k: Tensor, v: Tensor, rows: Tensor, hidden: Tensor, masked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """S ``(N, F, V)``, z and top ``(N, F)``."""
    from attention.kernels import favor_triton_programs as programs

    sums, norms = launch.parts()
    tops = torch.empty_like(norms)
    sizes = (launch.length, launch.heads, launch.width, launch.value_width, launch.features)
    launch.over_features(
        programs.key_sums, k, v, rows, hidden, sums, norms, tops, *sizes, launch.splits, launch.span,
        launch.half_root, NEVER, MASKED=masked,
    )  # fmt: skip
    top = tops.amax(1, keepdim=True)
    factor = (tops - top).exp()
    return (sums * factor[..., None]).sum(1), (norms * factor).sum(1), top.squeeze(1)


class _Favor(torch.autograd.Function):
    """``(q, k, v, rows, key_mask, heads) -> out (N, L, V)``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, key_mask: Tensor | None, heads: int
    ) -> Tensor:
        from attention.kernels import favor_triton_programs as programs

        q, k, v = (x.contiguous() for x in (q, k, v))
        launch = _Launch(q, v, rows, heads)
        # a pointer must point somewhere even where it is not read
        hidden = torch.zeros(1, dtype=torch.uint8, device=q.device) if key_mask is None else (~key_mask).byte()
        sums, norms, tops = _key_sums(launch, k, v, rows, hidden, key_mask is not None)
        out = torch.empty_like(v)
        log_den = torch.empty(launch.count, launch.length, device=q.device)
        launch.over_tokens(
            programs.query_outputs, q, rows, sums, norms, tops, out, log_den, launch.length, launch.width,
            launch.value_width, launch.features,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, rows, hidden, sums, norms, tops, out, log_den)
        ctx.launch, ctx.masked = launch, key_mask is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        from attention.kernels import favor_triton_programs as programs

        q, k, v, rows, hidden, sums, norms, tops, out, log_den = ctx.saved_tensors
        launch, grad = ctx.launch, grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        sizes = (launch.length, launch.width, launch.value_width, launch.features)
        launch.over_tokens(
            programs.query_gradients, q, rows, sums, norms, tops, log_den, grad, delta, grad_q, *sizes
        )  # fmt: skip
        grad_sums, grad_norms = launch.parts()
        launch.over_features(
            programs.sum_gradients, q, rows, tops, log_den, grad, delta, grad_sums, grad_norms, *sizes,
            launch.splits, launch.span,
        )  # fmt: skip
        launch.over_tokens(
            programs.key_gradients, k, v, rows, hidden, tops, grad_sums.sum(1), grad_norms.sum(1), grad_k, grad_v,
            launch.length, launch.heads, launch.width, launch.value_width, launch.features, launch.half_root,
            MASKED=ctx.masked,
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None, None


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    features: str,
    key_mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """The "triton" kernel of ``favor_attention``; k and v are zero where ``key_mask`` is False."""
    scaled = projection.detach().float() * q.shape[-1] ** -0.25
    rows = torch.cat([sign * scaled for sign in SIGNS[features]]).contiguous()
    out = _Favor.apply(*(x.flatten(0, 1) for x in (q, k, v)), rows, key_mask, q.shape[1])
    return out.unflatten(0, q.shape[:2])


def _missing() -> str | None:
    return None if importlib.util.find_spec("triton") else "Triton is not installed; pip install triton"


def _refuses(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, *, features: str, causal: bool, **_: object
) -> str | None:
    if causal or features not in SIGNS:
        return "it is bidirectional, with positive or hyperbolic features; use attention.kernel=torch"
    if q.dtype == torch.float64:
        return "its sums are fp32; use attention.kernel=torch"
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"it takes heads of at most {MAX_WIDTH} columns; use attention.kernel=torch"
    if projection.requires_grad:
        return "it gives the projection no gradient; use attention.kernel=reference or projection.detach()"
    return None


KERNEL = dispatch.Kernel(
    "triton", _run, devices=("cuda", "cpu") if INTERPRETED else ("cuda",), missing=_missing, refuses=_refuses
)
"""Runs on CPU tensors too, slowly, where TRITON_INTERPRET=1 was set before the import."""
