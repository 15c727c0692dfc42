"""Attention as plain loops in float64, written from the formulas alone.

Shapes: B batch, H heads, L sequence length, E head width; every function takes q, k ``(B, H, L, E)``, v
``(B, H, L, Ev)`` and returns ``(B, H, L, Ev)``.
"""

import math

import torch


def visible_keys(key_mask, causal, batch, query, length):
    """Indices of the keys that ``query`` sees."""
    keys = range(query + 1) if causal else range(length)
    return [j for j in keys if key_mask is None or key_mask[batch, j]]


def weighted_mean(log_weight, q, k, v, key_mask=None, causal=False):
    """``sum_j e^{log_weight(q_i, k_j)} v_j`` over the same sum without v; zeros for a query without a key."""
    q, k, v = q.double(), k.double(), v.double()
    batch_size, heads, length, _ = q.shape
    rows = []
    for b in range(batch_size):
        for h in range(heads):
            for i in range(length):
                keys = visible_keys(key_mask, causal, b, i, length)
                if not keys:
                    rows.append(torch.zeros_like(v[b, h, i]))
                    continue
                logs = log_weight(q[b, h, i], k[b, h, keys])  # one a key
                rows.append(torch.softmax(logs, 0) @ v[b, h, keys])
    return torch.stack(rows).view(v.shape)


def softmax_attention(q, k, v, **masks):
    """Log weight ``q.k / sqrt(E)``."""
    return weighted_mean(lambda x, keys: keys @ x / math.sqrt(len(x)), q, k, v, **masks)


def linear_attention(q, k, v, **masks):
    """Weight ``sum_r phi(q)_r phi(k)_r`` with ``phi(x) = x + 1`` for x > 0, ``e^x`` else."""

    def log_phi(x):
        return torch.where(x > 0, x.clamp(min=0).log1p(), x)

    return weighted_mean(lambda x, keys: torch.logsumexp(log_phi(keys) + log_phi(x), 1), q, k, v, **masks)


def favor_attention(q, k, v, projection, *, features="positive", **masks):
    """Weight ``phi(q).phi(k)`` in log space, for any norm; not ``trig``, whose weights cross zero."""
    rows = projection.double() if features == "positive" else torch.cat([projection, -projection]).double()

    def log_weight(x, keys):
        x, keys = x * len(x) ** -0.25, keys * len(x) ** -0.25
        norms = (x @ x + (keys * keys).sum(-1, keepdim=True)) / 2
        return torch.logsumexp((x + keys) @ rows.T - norms, 1)

    return weighted_mean(log_weight, q, k, v, **masks)
