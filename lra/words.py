"""Numbers in sentences."""


def count(number: int, noun: str) -> str:
    """``1 run``, ``1,234 runs``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def about(seconds: float) -> str:
    """A duration that was estimated."""
    hours, minutes = seconds / 3600, round(seconds / 60, 1)
    if hours >= 48:
        return f"about {hours / 24:.1f} days"
    if hours >= 1.5:
        return f"about {hours:.1f} hours"
    if seconds < 60:
        return "under a minute"
    return "about 1 minute" if minutes == 1 else f"about {minutes:.1f} minutes"
