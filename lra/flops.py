"""FLOPs of one optimiser step: torch's flop counter for the network, the declared cost of our ops in it.

Shapes: L tokens, N documents a row.

Counted are forward and backward of the products named in ``attention.kernels.flops``; the same number therefore
comes out for every kernel and device, compiled or not, with activation checkpointing or without. The update of the
weights is left out: it has no products.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from numpy.polynomial import Polynomial
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import FlopCounterMode

from attention.kernels import dispatch
from attention.kernels.flops import COSTS, OUTPUT_LIKE, Cost
from lra.meter import Meter
from lra.peak import matmul_peak

Shapes = Mapping[tuple[int, int], int]
"""How often a batch of ``(sequences, L)`` was processed."""


class _Counted(torch.autograd.Function):
    """An op that does nothing but have its cost added to ``total[op]``, forward and backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, op: str, cost: Cost, total: Counter, like: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        total[op] += cost.forward
        ctx.op, ctx.cost, ctx.total = op, cost, total
        ctx.save_for_backward(*inputs)
        return torch.zeros_like(like)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.total[ctx.op] += ctx.cost.backward
        return (
            None,
            None,
            None,
            None,
            *(torch.zeros_like(x) if x.is_floating_point() else None for x in ctx.saved_tensors),
        )


def count(model: nn.Module, length: int, *, documents: int = 1) -> int:
    """FLOPs of forward and backward over one row of ``length`` tokens, all of them real.

    Runs the network once in eval mode, without its mixers' kernels; no gradient, generator or weight is touched.
    """
    ops: Counter = Counter()

    def stand_in(op: str, *arguments: torch.Tensor | None, **options: object) -> object:
        inputs = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
        like = arguments[OUTPUT_LIKE.get(op, 2)]
        out = _Counted.apply(op, COSTS[op](*arguments, **options), ops, like.detach(), *inputs)
        return (out, None) if op in OUTPUT_LIKE else out

    parameters = [p for p in model.parameters() if p.requires_grad]
    tokens = torch.zeros(documents, length, dtype=torch.int64, device=parameters[0].device)
    training = model.training
    model.eval()
    try:
        with dispatch.replaced(stand_in), FlopCounterMode(display=False) as counter:
            # not model(...), which may be compiled
            logits = model.forward(tokens, torch.ones_like(tokens, dtype=torch.bool))
            torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
    finally:
        model.train(training)
    return counter.get_total_flops() + sum(ops.values())


def mean_flops(model: nn.Module, shapes: Shapes, steps: int, *, documents: int = 1) -> float | None:
    """FLOPs of the mean step of ``steps`` that processed ``shapes``; ``None`` where that is unknown.

    The cost of a batch is that of a row times the rows. Rows are counted at three lengths and taken to cost
    ``a + b L + c L^2`` at the others: exact for linear and for full attention.
    """
    if not steps or not shapes:
        return None
    lengths = sorted({length for _, length in shapes})
    knots = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    costs = [count(model, length, documents=documents) for length in knots]
    cost_of_row = Polynomial.fit(knots, costs, deg=len(knots) - 1)
    total = sum(times * sequences / documents * cost_of_row(length) for (sequences, length), times in shapes.items())
    return float(total) / steps


def utilisation(model: nn.Module, meter: Meter, precision: str, *, documents: int = 1, devices: int = 1) -> dict:
    """``ResultRow`` fields: FLOPs of a step, matmul peak of a device, and the share of it that was reached."""
    flops = mean_flops(model, meter.shapes, meter.timed_steps, documents=documents)
    peak = matmul_peak(meter.device, precision)
    speed = meter.report()["steps_per_second"]
    known = flops is not None and peak is not None and speed is not None
    return {
        "flops_per_step": flops,
        "matmul_flops_per_second": peak,
        "model_flops_utilisation": flops * speed / (peak * devices) if known else None,
    }
