"""Comparison of two greedy runs of one model that may differ by rounding. In bfloat16, sums depend on the batch.

The rule: while the texts agree, log probabilities agree within a tolerance. Where texts first differ, each run finds
the other's token as likely as its own, within that tolerance. Later tokens have another context and are not compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roseinfer.core.plan import TokenLogprobs

Texts = Mapping[str, Sequence[TokenLogprobs]]


class DifferentError(AssertionError):
    """Difference between runs that is more than rounding."""


@dataclass
class Compared:
    """Result: `tokens` that agree, texts that `parted` at a near tie, the `worst` difference of a logprob."""

    tokens: int = 0
    parted: int = 0
    worst: float = 0.0


def compare(ours: Texts, theirs: Texts, tolerance: float) -> Compared:
    """Compare texts by name, with a few of the likeliest tokens of every position. Raise `DifferentError`."""
    assert ours.keys() == theirs.keys()
    seen = Compared()
    for name in ours:
        assert len(ours[name]) == len(theirs[name]), name
        for at, (a, b) in enumerate(zip(ours[name], theirs[name], strict=True)):
            where = f"{name}, token {at}"
            if a.token_id != b.token_id:
                _check_near_tie(where, a, b.token_id, tolerance)
                _check_near_tie(where, b, a.token_id, tolerance)
                seen.parted += 1
                break
            seen.tokens += 1
            seen.worst = max(seen.worst, _difference(where, a, b, tolerance))
    return seen


def _difference(where: str, a: TokenLogprobs, b: TokenLogprobs, tolerance: float) -> float:
    """Return the largest difference over the tokens that both list."""
    left, right = dict(a.top) | {a.token_id: a.logprob}, dict(b.top) | {b.token_id: b.logprob}
    worst = max(abs(left[token] - right[token]) for token in left.keys() & right.keys())
    if not worst <= tolerance:
        raise DifferentError(f"{where}: logprobs differ by {worst:.4f}, more than {tolerance}: {a} and {b}")
    return worst


def _check_near_tie(where: str, own: TokenLogprobs, other: int, tolerance: float) -> None:
    margin = own.logprob - dict(own.top).get(other, -float("inf"))
    if not margin <= tolerance:
        raise DifferentError(f"{where}: {other} instead of {own.token_id}, which leads by {margin:.4f}: {own}")
