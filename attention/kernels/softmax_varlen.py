"""FlashAttention over real tokens only: padding is taken out before the arithmetic and put back after it.

Shapes: B batch, H heads, L sequence length, E head width, q and k ``(B, H, L, E)``, v ``(B, H, L, Ev)``,
key_mask bool ``(B, L)``, T packed tokens, packed q, k and v ``(T, H, E)``.

A key that is taken out is one that no query sees. Queries are taken out only if the caller does not ask for
outputs at masked positions (``skip_masked_queries``); then a row of n real tokens costs n^2, else L n. The order
of tokens survives, so causal attention among the packed tokens is causal attention among the real ones.

On the CPU the rows run in groups of similar length (``grouped_flash``), on CUDA all rows run in one launch of
FlashAttention-2's variable-length form (``varlen``).
"""

import inspect
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

CALL_WORK = 2**19
"""Products q.k, times H * E, that take about as long as a call of its own, forward and backward: measured."""
COPY_WORK = 128
"""The same for a token of a row that shares a call, as rows of a batch must be copied together: measured, in
products q.k. So it is short rows alone that share calls; a long one is read in place."""


class _Pack(torch.autograd.Function):
    """``x (S, W)``, distinct ``index (T)`` -> ``x[index] (T, W)``; indexing's own gradient accumulates, slowly."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.length, grad.shape[1]).index_copy_(0, index, grad.contiguous()), None


class _Unpack(torch.autograd.Function):
    """``x (T, W)``, distinct ``index (T)`` -> ``(length, W)`` with x at the index and zeros elsewhere."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(length, x.shape[1]).index_copy_(0, index, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.contiguous().index_select(0, index), None, None


def pack(x: Tensor, index: Tensor) -> Tensor:
    """``(B, H, L, E)`` -> ``(T, H, E)``; ``index (T)`` counts the B * L positions, each at most once."""
    heads, width = x.shape[1], x.shape[3]
    return _Pack.apply(x.transpose(1, 2).reshape(-1, heads * width), index).view(-1, heads, width)


def unpack(x: Tensor, index: Tensor, batch: int, length: int) -> Tensor:
    """``(T, H, E)`` -> ``(B, H, L, E)`` with zeros where no token was packed."""
    heads, width = x.shape[1:]
    flat = _Unpack.apply(x.reshape(-1, heads * width), index, batch * length)
    return flat.view(batch, length, heads, width).transpose(1, 2)


@dataclass(frozen=True)
class Group:
    """Rows of the batch that share one call, with the length of the longest."""

    rows: list[int]
    length: int
    even: bool
    """All rows have this length: no mask is needed."""


def plan(lengths: list[int], length: int, width: int, *, skip: bool) -> list[Group] | None:
    """Groups of rows with ``lengths`` real tokens; None where one masked call for all is cheaper.

    ``width`` is H * E. A row without a token is in no group.
    """
    groups: list[Group] = []
    for row in sorted((row for row in range(len(lengths)) if lengths[row]), key=lambda row: -lengths[row]):
        own = lengths[row]
        last = groups[-1] if groups else Group([], 0, True)
        queries = (last.length, own) if skip else (length, length)
        padding = last.length * queries[0] - own * queries[1]
        if last.rows and (padding + COPY_WORK * own) * width < CALL_WORK:
            groups[-1] = Group([*last.rows, row], last.length, last.even and own == last.length)
        else:
            groups.append(Group([row], own, True))
    work = 0
    for group in groups:
        copies = COPY_WORK if len(group.rows) > 1 else 0
        work += len(group.rows) * group.length * ((group.length if skip else length) + copies)
    saved = len(lengths) * length * length - work
    return groups if saved * width > len(groups) * CALL_WORK else None


def grouped_flash(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, *, causal: bool, skip: bool) -> Tensor | None:
    """FlashAttention on the CPU, one call a group of rows; None where that does not pay.

    q, k and v have one width. Causal attention without ``skip`` is not offered: a masked query sees the keys
    before it, and with the keys packed their positions are gone.
    """
    batch, heads, length, width = q.shape
    lengths = key_mask.sum(1)
    groups = None if causal and not skip else plan(lengths.tolist(), length, heads * width, skip=skip)
    if groups is None:
        return None
    positions = torch.arange(length)
    if not torch.equal(key_mask, positions < lengths[:, None]):
        # holes: real tokens first, each row in its own order
        positions = torch.argsort(key_mask, dim=1, descending=True, stable=True)
    return _Grouped.apply(q, k, v, lengths, groups, positions, causal, skip)


class _Take:
    """Reads the tokens of a group out of ``(B, H, L, E)`` and writes them back; padding comes last."""

    def __init__(self, group: Group, lengths: Tensor, positions: Tensor) -> None:
        self.group = group
        self.in_place = len(group.rows) == 1 and positions.dim() == 1
        self.mask: Tensor | None = None
        if self.in_place:
            return
        rows = torch.tensor(group.rows)
        chosen = positions[rows, : group.length] if positions.dim() == 2 else slice(group.length)
        self.where = (rows[:, None] if positions.dim() == 2 else rows, chosen)
        if not group.even:
            self.mask = torch.arange(group.length) < lengths[rows, None]

    def view(self, x: Tensor) -> Tensor:
        """The tokens of a row in their place; ``narrow`` because indexing takes as long as a short row itself."""
        return x.narrow(0, self.group.rows[0], 1).narrow(2, 0, self.group.length)

    def tokens(self, x: Tensor) -> Tensor:
        """``(rows, H, length, E)``, zeros at padding: NaN there would survive a weight of zero."""
        if self.in_place:
            return self.view(x)
        part = x.transpose(1, 2)[self.where]
        if self.mask is not None:
            part = part.masked_fill(~self.mask[..., None, None], 0.0)
        return part.transpose(1, 2)

    def all_tokens(self, x: Tensor) -> Tensor:
        """``(rows, H, L, E)``, whatever they hold."""
        return x.narrow(0, self.group.rows[0], 1) if self.in_place else x[self.group.rows]

    def bias(self, like: Tensor) -> Tensor | None:
        """``(rows, 1, 1, length)``: 0 for a token, -inf for padding; the kernel itself takes no bool mask."""
        if self.mask is None:
            return None
        return like.new_zeros(self.mask.shape).masked_fill_(~self.mask, -torch.inf)[:, None, None, :]

    def put(self, x: Tensor, part: Tensor) -> None:
        """The opposite of ``tokens``."""
        if self.in_place:
            self.view(x).copy_(part)
            return
        if self.mask is not None:
            part = part.masked_fill(~self.mask[:, None, :, None], 0.0)
        x.transpose(1, 2)[self.where] = part.transpose(1, 2)

    def put_all(self, x: Tensor, part: Tensor) -> None:
        """The opposite of ``all_tokens``."""
        x[self.group.rows] = part


class _Grouped(torch.autograd.Function):
    """SDPA's CPU kernel, called by its own name: views in, results straight into place.

    Through autograd every slice of a row would add a gradient of the whole batch.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        groups: list[Group],
        positions: Tensor,
        causal: bool,
        skip: bool,
    ) -> Tensor:
        batch, heads, length, width = q.shape
        out = q.new_zeros(batch, length, heads, width).transpose(1, 2)
        takes, sums = [_Take(group, lengths, positions) for group in groups], []
        for take in takes:
            queries = take.tokens(q) if skip else take.all_tokens(q)
            part, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, take.tokens(k), take.tokens(v), 0.0, causal, attn_mask=take.bias(q)
            )
            (take.put if skip else take.put_all)(out, part)
            sums.append(log_sum)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.takes, ctx.causal, ctx.skip = takes, causal, skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        grads = [torch.zeros_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in (q, k, v)]
        grads = [x.transpose(1, 2) for x in grads]
        for take, log_sum in zip(ctx.takes, sums, strict=True):
            of_queries = take.tokens if ctx.skip else take.all_tokens
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_queries(grad),
                of_queries(q),
                take.tokens(k),
                take.tokens(v),
                of_queries(out),
                log_sum,
                0.0,
                ctx.causal,
                attn_mask=take.bias(q),
            )
            (take.put if ctx.skip else take.put_all)(grads[0], parts[0])
            take.put(grads[1], parts[1])
            take.put(grads[2], parts[2])
        return *grads, None, None, None, None, None


@cache
def varlen_missing() -> str | None:
    """Why this torch has no usable ``varlen_attn``, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "torch.nn.attention.varlen is not in this torch; install torch>=2.11"
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return "varlen_attn of this torch takes no window_size; install torch>=2.11"
    return None


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor,
    causal: bool,
    skip_masked_queries: bool,
) -> Tensor:
    """FlashAttention-2 over packed rows, CUDA, fp16 and bf16. Not yet run on a GPU.

    Waits for the device once, to learn how many tokens are real.
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, _, length, head_width = q.shape
    value_width = v.shape[-1]
    # FlashAttention wants one width for all, a multiple of 8; zero columns change neither scores nor outputs
    width = -(-max(head_width, value_width) // 8) * 8
    if width != head_width:
        q = q * (width / head_width) ** 0.5  # the kernel divides by the root of the padded width
    k_index = key_mask.flatten().nonzero().squeeze(1)
    k_ends = _ends(key_mask.sum(1))
    if skip_masked_queries:
        q_index, q_ends = k_index, k_ends
    else:
        q_index = torch.arange(batch * length, device=q.device)
        q_ends = _ends(torch.full((batch,), length, device=q.device))
    packed_k, packed_v = (pack(functional.pad(x, (0, width - x.shape[-1])), k_index) for x in (k, v))
    out = varlen_attn(
        pack(functional.pad(q, (0, width - head_width)), q_index),
        packed_k,
        packed_v,
        q_ends,
        k_ends,
        length,  # an upper bound of the row lengths is enough, and is known without waiting
        length,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    out = unpack(out[..., :value_width], q_index, batch, length)
    # whatever the kernel makes of a row without keys
    return out.masked_fill(~key_mask.any(1)[:, None, None, None], 0.0)


def _ends(lengths: Tensor) -> Tensor:
    """``(B)`` lengths -> ``(B + 1)`` int32 offsets of the packed rows."""
    return functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def varlen_refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    causal: bool,
    skip_masked_queries: bool,
) -> str | None:
    """Why ``varlen`` cannot take these arguments and what to change, or None."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention on CUDA takes fp16 and bf16, not {q.dtype}; use trainer.precision=bf16"
    if key_mask is None:
        return "without a padding mask there is nothing to take out; use kernel=flash"
    if causal and not skip_masked_queries:
        return "causal outputs at masked positions are lost with the padding; pass skip_masked_queries=True"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return "FlashAttention takes heads of at most 256 columns; use more heads or kernel=efficient"
    return None
