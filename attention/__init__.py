"""Token mixers by name.

To add one: a file with a ``Mixer`` and its ``Config``, a line in ``REGISTRY``, a YAML in ``conf/attention``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # what needs no mixer needs no torch
    from attention.base import Mixer, MixerConfig

REGISTRY: dict[str, str] = {
    "softmax": "attention.softmax:Softmax",
    "flash": "attention.softmax:Flash",
    "performer": "attention.performer:Performer",
    "linear": "attention.linear:Linear",
    "rwkv4": "attention.rwkv4:RWKV4",
    "rwkv7": "attention.rwkv7:RWKV7",
    "mamba": "attention.mamba:Mamba",
}


def load(name: str) -> type[Mixer]:
    """The mixer class registered under ``name``; ``ValueError`` lists the names there are."""
    if name not in REGISTRY:
        raise ValueError(f"attention={name} is unknown; choose one of {', '.join(REGISTRY)}")
    module, _, cls = REGISTRY[name].partition(":")
    return getattr(import_module(module), cls)


def build(config: MixerConfig, width: int, *, layer: int = 0, num_layers: int = 1) -> Mixer:
    """Build the mixer that ``config`` describes, of model width ``width``, for block ``layer`` of ``num_layers``."""
    return load(config.name)(config, width, layer=layer, num_layers=num_layers)
