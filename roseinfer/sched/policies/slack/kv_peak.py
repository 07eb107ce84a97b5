"""How many KV tokens a set of requests will hold at most, if each leaves when its output is as long as expected."""

from collections.abc import Iterable


def peak_tokens(rows: Iterable[tuple[float, float]]) -> float:
    """`rows`: (tokens held now, tokens still to come) of each request, all growing at the same pace.

    When the i-th longest-lived leaves, those at least as long-lived hold what they hold now and what has come since;
    the peak is the largest such sum (LightLLM's estimate).
    """
    held, peak = 0.0, 0.0
    for count, (used, left) in enumerate(sorted(rows, key=lambda row: -row[1]), 1):
        held += used
        peak = max(peak, held + left * count)
    return peak
