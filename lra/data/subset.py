"""A part of the rows of a split, the same for every backend, seed and machine."""

import numpy as np

from lra.errors import UserError

SEED = 2020


def choose(there: int, rows: int, key: str) -> np.ndarray:
    """Sorted indices of ``rows`` of the rows that are ``there``; 0 is all.

    A larger choice holds every smaller one. ``UserError`` names the option ``key`` if there are fewer.
    """
    if rows > there:
        raise UserError(f"{key}={rows}: the source has {there} rows; ask for at most as many, or for 0, which is all")
    if not rows:
        return np.arange(there)
    # raw output of the bit generator: unlike a permutation it is promised not to change with numpy
    order = np.argsort(np.random.PCG64(SEED).random_raw(there), kind="stable")
    return np.sort(order[:rows])
