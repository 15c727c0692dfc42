"""Length regimes: the axis along which mixers are compared."""

POINTS: dict[str, int | None] = {"native": None, "short": 256, "medium": 1024, "long": 4096, "extreme": 16384}
"""``regime=`` sets a task's length to this point; ``native`` keeps LRA's own."""


def regime_of(length: int) -> str:
    """The regime of a sequence length: short < 512 <= medium < 2000 <= long <= 8000 < extreme."""
    if length < 512:
        return "short"
    if length < 2000:
        return "medium"
    return "long" if length <= 8000 else "extreme"
