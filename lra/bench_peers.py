"""What the kernels are compared with: the same ops in plain torch, and other packages' implementations.

The packages come with ``pip install -e '.[bench]'``; each is imported when it is first called. Peers take the op's
own arguments and give its layout back, without timed conversions that their own callers would not do.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from torch import Tensor
from torch.nn import functional

EXTRA = "pip install -e '.[bench]'"


@dataclass(frozen=True)
class Missing:
    """A competitor that is not there, and why."""

    name: str
    reason: str


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA as most code calls it for padded rows: a bool mask ``(B, 1, L, L)``."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def plain_favor(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> Tensor:
    """Bidirectional FAVOR+ with positive features, in a few tensor operations over the whole sequence."""
    scale = q.shape[-1] ** -0.25
    queries, keys, rows = q.float() * scale, k.float() * scale, projection.float()
    log_q = queries @ rows.T
    log_k = keys @ rows.T - keys.square().sum(-1, keepdim=True) / 2
    phi_q = (log_q - log_q.detach().amax(-1, keepdim=True)).exp()
    phi_k = (log_k - log_k.detach().amax((-1, -2), keepdim=True)).exp()
    numerator = phi_q @ (phi_k.transpose(-1, -2) @ v.float())
    return (numerator / (phi_q @ phi_k.sum(-2)[..., None])).to(v.dtype)


def plain_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bidirectional linear attention with elu + 1, in a few tensor operations over the whole sequence."""
    phi_q, phi_k = functional.elu(q.float()) + 1, functional.elu(k.float()) + 1
    numerator = phi_q @ (phi_k.transpose(-1, -2) @ v.float())
    return (numerator / (phi_q @ phi_k.sum(-2)[..., None])).to(v.dtype)


def _performer_pytorch() -> Callable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that torch and Python have deprecated
        from performer_pytorch.performer_pytorch import FastAttention

    modules: dict[int, FastAttention] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> Tensor:
        module = modules.get(id(projection))
        if module is None:
            module = FastAttention(dim_heads=q.shape[-1], nb_features=projection.shape[0]).to(q.device)
            module.projection_matrix = projection
            modules[id(projection)] = module
        return module(q, k, v)

    return attention


def _mambapy() -> Callable:
    from mambapy.mamba import MambaBlock

    def scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        # its products refuse mixed dtypes; the scan itself is meant to run in fp32
        steps = functional.softplus(delta.float())
        # the method reads nothing of the block but its arguments
        return MambaBlock.selective_scan(None, u.float(), steps, a, b.float(), c.float(), d).to(u.dtype)

    return scan


def _transformers() -> Callable:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    return rwkv_linear_attention_cpu


PEERS: dict[str, tuple[str, str, Callable[[], Callable]]] = {
    "favor_attention": ("performer-pytorch", "performer_pytorch", _performer_pytorch),
    "selective_scan": ("mambapy", "mambapy", _mambapy),
    "wkv4": ("transformers", "transformers", _transformers),
}


def load(op: str) -> tuple[str, Callable | Missing]:
    """Name of the op's peer, and its callable or why there is none. The first call imports the package."""
    name, module, importer = PEERS[op]
    if find_spec(module) is None:
        return name, Missing(name, f"not installed; {EXTRA}")
    imported = cache(importer)
    return name, lambda *arguments: imported()(*arguments)


def versions() -> dict[str, str | None]:
    """Installed versions of the peers, None for what is absent."""
    found: dict[str, str | None] = {}
    for name, *_ in PEERS.values():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
