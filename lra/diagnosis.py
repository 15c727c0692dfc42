"""Where a number stopped being finite."""

from collections.abc import Callable

import torch
from torch import nn

from lra.data.loader import Batch


class NotFinite(FloatingPointError):
    """The loss or a gradient is NaN or infinite."""


def culprit(model: nn.Module, batches: list[Batch], autocast: Callable[[], object]) -> str:
    """Name of the first module whose output is not finite, else of the first parameter whose gradient is not."""
    names: list[str] = []

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            if isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
                names.append(name)

        return hook

    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        return f"weights of {bad[0]}"
    # leaves first: a container ends after its parts, so the innermost culprit is named
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), autocast():
            for batch in batches:
                model(batch.tokens, batch.key_mask)
                if names:
                    return f"output of {names[0]}"
    finally:
        for handle in handles:
            handle.remove()
    gradients = [n for n, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return f"gradient of {gradients[0]}" if gradients else "the loss"


def describe_rows(rows: list[int], most: int = 8) -> str:
    """Row numbers of the training split, as many as fit into a line."""
    more = f" and {len(rows) - most} more, all in train.log" if len(rows) > most else ""
    return ", ".join(map(str, rows[:most])) + more
