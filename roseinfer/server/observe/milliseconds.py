"""Times in JSON."""


def ms(seconds: float | None) -> float | None:
    """Convert to ms; None for infinity, which JSON lacks."""
    return None if seconds is None or seconds == float("inf") else round(seconds * 1000, 3)
