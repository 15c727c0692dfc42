"""The training protocol: how long, how large, how fast, and what to do when memory ends."""

import math
from dataclasses import dataclass, field

SCHEDULES = ("cosine", "linear", "rsqrt")
PRECISIONS = ("auto", "fp32", "bf16")
BUDGETS = ("epochs", "tokens", "seconds")
ON_OOM = ("fail", "halve")
MOST = 10**9
MOST_TOKENS = 10**15
LEAST_EPS = 1e-30
"""Less is 0 beside the squares that fp32 holds."""
MOST_RATE = 3e38
"""More is infinite in fp32."""


@dataclass
class TrainerConfig:
    """The training protocol."""

    name: str = "custom"
    """Name of the preset; the table shows it."""
    steps: int = 600
    """Optimiser steps; not counted where ``epochs``, ``tokens`` or ``seconds`` is the budget."""
    epochs: float = 0
    """Budget in passes over the training split instead of ``steps``."""
    tokens: int = 0
    """Budget in real tokens instead of ``steps``: equal for every mixer, whatever the padding."""
    seconds: float = 0
    """Budget in seconds of training (data and optimiser steps) instead of ``steps``: equal time for every mixer."""
    time_limit: float = 0
    """Stop after so many seconds of training, wherever the schedule stands; 0 = no limit. Shortens any preset."""
    batch_size: int = 32
    """Rows per optimiser step."""
    accumulation: int = 1
    """Micro-batches per optimiser step; must divide ``batch_size``."""
    lr: float = 1e-3
    """Peak learning rate (cosine, linear), or the factor of the reciprocal square root (rsqrt)."""
    schedule: str = "cosine"
    """After the warm-up: ``cosine`` or ``linear`` to 0, or ``rsqrt``, the reciprocal square root of the step."""
    lr_tried: list[float] = field(default_factory=list)
    """Rates that were compared on validation before ``lr`` was chosen for this mixer: part of the protocol, while
    the choice is not."""
    warmup: int = 60
    """Steps of linear warm-up."""
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    clip: float = 1.0
    """Largest global gradient norm; 0 = no clipping."""
    eval_every: int = 150
    """Steps between two passes over the validation split."""
    log_every: int = 20
    precision: str = "auto"
    """``fp32``, ``bf16`` (autocast), or ``auto``: bf16 on a GPU that has it, else fp32.

    fp16 is not offered: the recurrent mixers hold sums that leave its range, see ``validate``.
    """
    timing_warmup: int = 10
    """First steps that do not count in the timing."""
    on_oom: str = "fail"
    """``fail``: out of memory is the result. ``halve``: halve the rows at once, the batch of a step stays the same."""
    memory_limit_gib: float = 0
    """CPU: memory that training may take on top of what the process holds; more is out of memory. 0 = no limit."""
    compile: bool = False
    """``torch.compile`` the network; its time has an account of its own."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass: less memory, about a third more compute."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms; the result says what could not be."""

    def budget(self) -> list[str]:
        """What replaces or cuts the steps of the preset, as ``key=value``."""
        return [f"{key}={getattr(self, key):g}" for key in (*BUDGETS, "time_limit") if getattr(self, key)]

    def validate(self) -> None:
        """Raise ``ValueError`` naming the key that does not fit."""
        for key, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"trainer.{key}={value} is not finite; give a number")
        for key in ("steps", "batch_size", "accumulation", "eval_every", "log_every"):
            if not 1 <= getattr(self, key) <= MOST:
                raise ValueError(f"trainer.{key}={getattr(self, key)} is out of range; give 1 ... {MOST}")
        for key in ("warmup", "timing_warmup", "clip", "weight_decay", *BUDGETS, "time_limit", "memory_limit_gib"):
            if getattr(self, key) < 0:
                raise ValueError(f"trainer.{key}={getattr(self, key)} is negative; give 0 or more")
            most = MOST_TOKENS if key == "tokens" else MOST
            if getattr(self, key) > most:
                raise ValueError(f"trainer.{key}={getattr(self, key)} is out of range; give 0 ... {most}")
        rates = [("lr", self.lr), ("eps", self.eps), *(("lr_tried", rate) for rate in self.lr_tried)]
        for key, value in rates:
            if not 0 < value <= MOST_RATE:
                raise ValueError(f"trainer.{key}={value} must be positive, and at most {MOST_RATE:g}; give another")
        if self.eps < LEAST_EPS:
            raise ValueError(f"trainer.eps={self.eps} is 0 in fp32; give {LEAST_EPS} or more")
        if len(given := [key for key in BUDGETS if getattr(self, key)]) > 1:
            raise ValueError(f"trainer.{given[0]} and trainer.{given[1]} are both budgets; give one of them")
        if not given and self.warmup >= self.steps:
            raise ValueError(
                f"trainer.warmup={self.warmup} is not below trainer.steps={self.steps}: training would never "
                f"leave its warm-up; lower trainer.warmup or raise trainer.steps"
            )
        if not given and self.timing_warmup >= self.steps:
            raise ValueError(
                f"trainer.timing_warmup={self.timing_warmup} is not below trainer.steps={self.steps}: no step "
                f"would be timed; lower trainer.timing_warmup"
            )
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"trainer.accumulation={self.accumulation} does not divide trainer.batch_size={self.batch_size}"
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"trainer.beta1={self.beta1}, trainer.beta2={self.beta2}: both must be in [0, 1)")
        for key, choices in (("schedule", SCHEDULES), ("precision", PRECISIONS), ("on_oom", ON_OOM)):
            if key == "precision" and self.precision == "fp16":
                raise ValueError(
                    "trainer.precision=fp16: the sums of the linear mixers, and gradients that are not scaled, leave "
                    "its range (largest number 65504); use bf16, which has the range of fp32"
                )
            if getattr(self, key) not in choices:
                raise ValueError(f"trainer.{key}={getattr(self, key)!r} is unknown; choose {' | '.join(choices)}")
