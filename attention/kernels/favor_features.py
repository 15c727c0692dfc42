"""Feature maps of the chunked FAVOR+ kernel, with their gradients; formulas in ``attention.kernels.favor``.

Shapes: N = B * H, T positions of one chunk, E head width, F features, q and k ``(N, T, E)``, hidden bool
``(N, T, 1)`` with True = padding, top ``(N, 1, F)`` or ``(N, 1, 1)``.

``top`` is the stabiliser: the running maximum of the exponents of the visible keys. Key features are relative
to it, so at most 1. It is finite also before the first visible key, when every exponent is -inf.
"""

import torch

Hidden = torch.Tensor | None


class Positive:
    """``exp(w_r.x' - |x'|^2/2)``; with the rows ``[W, -W]`` the hyperbolic features.

    The maximum is taken per feature, not over all of them: ``S_r = sum_j exp(a_jr - top_r) v_j`` then has a
    term of weight 1 for every r, so a query, whose largest ``exp(w_r.q' + top_r)`` is scaled to 1, has a
    denominator of at least 1 whatever the norms are.
    """

    always_exact = False

    def __init__(self, projection: torch.Tensor, signs: tuple[int, ...] = (1,)) -> None:
        width = projection.shape[1]
        self.rows = torch.cat([sign * projection for sign in signs]) * width**-0.25  # (F, E), w.x' = rows @ x
        self.columns = self.rows.T.contiguous()
        self.inverse_root = width**-0.5  # |x'|^2 = |x|^2 / sqrt(E)
        self.num_features = self.rows.shape[0]

    def first_top(self, count: int) -> torch.Tensor:
        """The stabiliser of N = ``count`` sequences before any key."""
        return self.rows.new_full((count, 1, self.num_features), torch.finfo(self.rows.dtype).min)

    def _exponents(self, k: torch.Tensor, hidden: Hidden) -> torch.Tensor:
        exponents = k @ self.columns
        exponents -= k.square().sum(-1, keepdim=True) * (self.inverse_root / 2)
        return exponents if hidden is None else exponents.masked_fill_(hidden, -torch.inf)

    def advance(self, k: torch.Tensor, hidden: Hidden, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key features ``(N, T, F)`` and the stabiliser that counts these keys in."""
        exponents = self._exponents(k, hidden)
        top = torch.maximum(top, exponents.amax(1, keepdim=True))
        return exponents.sub_(top).exp_(), top

    def keys(self, k: torch.Tensor, hidden: Hidden, top: torch.Tensor) -> torch.Tensor:
        """Key features ``(N, T, F)`` relative to a known stabiliser."""
        return self._exponents(k, hidden).sub_(top).exp_()

    def queries(self, q: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """Query features ``(N, T, F)``; ``|q'|^2/2`` and the row maximum are factors of a row and cancel."""
        exponents = (q @ self.columns).add_(top)
        return exponents.sub_(exponents.amax(-1, keepdim=True)).exp_()

    def grad_queries(self, q: torch.Tensor, phi: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of q from ``grad``, that of ``phi = queries(q)``; overwrites ``grad``."""
        return grad.mul_(phi) @ self.rows

    def grad_keys(self, k: torch.Tensor, phi: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of k from ``grad``, that of ``phi = keys(k)``; overwrites ``grad``."""
        grad.mul_(phi)
        return (grad @ self.rows).sub_(k * (grad.sum(-1, keepdim=True) * self.inverse_root))

    def exact(
        self, q: torch.Tensor, k: torch.Tensor, hidden: Hidden, top: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query features for the state ``(N, T, F)`` and causal weights within the chunk ``(N, T, T)``.

        Row i is scaled by what i itself sees, so that no later key of the chunk, however much larger its
        features, makes it underflow. Costs T times the exponentials; differentiable by autograd.
        """
        exponents = q @ self.columns
        keys = k @ self.columns - k.square().sum(-1, keepdim=True) * (self.inverse_root / 2)
        logits = torch.logsumexp(exponents[:, :, None, :] + keys[:, None, :, :], -1)
        logits = logits.masked_fill(invisible(logits, hidden), -torch.inf)
        exponents = exponents + top
        largest = torch.maximum(exponents.amax(-1, keepdim=True), logits.amax(-1, keepdim=True)).detach()
        return (exponents - largest).exp(), (logits - largest).exp()


class Trig:
    """``exp(|x'|^2/2) [cos(w_r.x'), sin(w_r.x')]``: only the norm of the key needs a stabiliser."""

    always_exact = True
    """Row-wise scaling of the T x T weights costs next to nothing here."""

    def __init__(self, projection: torch.Tensor) -> None:
        width = projection.shape[1]
        self.rows = projection * width**-0.25  # (M, E)
        self.columns = self.rows.T.contiguous()
        self.inverse_root = width**-0.5
        self.num_features = 2 * self.rows.shape[0]

    def first_top(self, count: int) -> torch.Tensor:
        """The stabiliser of N = ``count`` sequences before any key."""
        return self.rows.new_full((count, 1, 1), torch.finfo(self.rows.dtype).min)

    def _exponents(self, k: torch.Tensor, hidden: Hidden) -> torch.Tensor:
        exponents = k.square().sum(-1, keepdim=True) * (self.inverse_root / 2)
        return exponents if hidden is None else exponents.masked_fill(hidden, -torch.inf)

    def _waves(self, x: torch.Tensor) -> torch.Tensor:
        projected = x @ self.columns
        return torch.cat([projected.cos(), projected.sin()], -1)

    def _grad_waves(self, waves: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        cosine, sine = waves.chunk(2, -1)
        grad_cosine, grad_sine = grad.chunk(2, -1)
        return (cosine * grad_sine - sine * grad_cosine) @ self.rows

    def advance(self, k: torch.Tensor, hidden: Hidden, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key features ``(N, T, F)`` and the stabiliser that counts these keys in."""
        top = torch.maximum(top, self._exponents(k, hidden).amax(1, keepdim=True))
        return self.keys(k, hidden, top), top

    def keys(self, k: torch.Tensor, hidden: Hidden, top: torch.Tensor) -> torch.Tensor:
        """Key features ``(N, T, F)`` relative to a known stabiliser."""
        return self._waves(k) * (self._exponents(k, hidden) - top).exp()

    def queries(self, q: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """Query features ``(N, T, F)``; ``exp(|q'|^2/2)`` is a factor of a row and cancels."""
        return self._waves(q)

    def grad_queries(self, q: torch.Tensor, phi: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of q from ``grad``, that of ``phi = queries(q)``."""
        return self._grad_waves(phi, grad)

    def grad_keys(self, k: torch.Tensor, phi: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of k from ``grad``, that of ``phi = keys(k)``."""
        radial = (phi * grad).sum(-1, keepdim=True) * self.inverse_root
        return self._grad_waves(phi, grad) + k * radial

    def exact(
        self, q: torch.Tensor, k: torch.Tensor, hidden: Hidden, top: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query features for the state ``(N, T, F)`` and causal weights within the chunk ``(N, T, T)``."""
        waves_q = self._waves(q)
        weights = waves_q @ self._waves(k).transpose(1, 2)
        logits = self._exponents(k, None).transpose(1, 2).expand_as(weights)
        logits = logits.masked_fill(invisible(weights, hidden), -torch.inf)
        largest = torch.maximum(top, logits.amax(-1, keepdim=True)).detach()
        return waves_q * (top - largest).exp(), weights * (logits - largest).exp()


def invisible(scores: torch.Tensor, hidden: Hidden) -> torch.Tensor:
    """True where query i must not see key j of its chunk: j > i, or j hidden; broadcasts to ``(N, T, T)``."""
    length = scores.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return future if hidden is None else future | hidden.transpose(1, 2)
