"""Optimiser and learning-rate schedules."""

import logging
import math

import torch
from torch import nn

from lra.protocol import TrainerConfig

log = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW; weight decay acts on matrices only, not on biases, norms, decay rates or other vectors."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    log.info(
        "AdamW, rate %g: weight decay %g on %s, 0 on %s",
        config.lr,
        config.weight_decay,
        _sizes(matrices, "matrix", "matrices"),
        _sizes(vectors, "vector", "vectors"),
    )
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def _sizes(parameters: list[nn.Parameter], one: str, many: str) -> str:
    return f"{len(parameters)} {one if len(parameters) == 1 else many} ({sum(p.numel() for p in parameters):,} numbers)"


def learning_rate(config: TrainerConfig, step: int, decay: float) -> float:
    """Rate of the ``step``-th update, counted from 1; ``decay`` as in ``Budget.decay``.

    ``cosine``: linear warm-up to ``lr``, then half a cosine to 0 after the last step (Loshchilov & Hutter 2017).
    ``linear``: linear warm-up, then linearly to 0.
    ``rsqrt``: ``lr * min(1, step / warmup) / sqrt(max(step, warmup))``, the schedule of LRA's released code.
    """
    warm = min(1.0, step / config.warmup) if config.warmup else 1.0
    if config.schedule == "rsqrt":
        return config.lr * warm / math.sqrt(max(step, config.warmup, 1))
    if step <= config.warmup:
        return config.lr * warm
    return config.lr * (1 - decay if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * decay)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set one rate for all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
