"""Statistics of a proportion."""

import math

Z_95 = 1.959963984540054


def wilson(correct: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927), 95 % unless ``z`` says otherwise."""
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"{correct} of {total} is no proportion")
    share = correct / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def is_stuck(correct: int, total: int, majority_baseline: float) -> bool:
    """Whether an accuracy is not above the constant answer: its Wilson interval reaches down to the baseline."""
    return wilson(correct, total)[0] <= majority_baseline
