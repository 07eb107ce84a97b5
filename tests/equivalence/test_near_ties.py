"""The comparison rule of bfloat16 runs, on hand-made texts."""

import pytest

from roseinfer.core.plan import TokenLogprobs
from tests.equivalence.near_ties import DifferentError, compare


def entry(*top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(top[0][0], top[0][1], 1, top)


SURE = entry((5, -0.1), (6, -3.0))
CLOSE, REVERSED = entry((7, -1.0), (8, -1.04)), entry((8, -1.0), (7, -1.03))


def test_texts_may_differ_from_a_near_tie_on():
    seen = compare({"a": [SURE, CLOSE, SURE], "b": [SURE]}, {"a": [SURE, REVERSED, CLOSE], "b": [SURE]}, 0.05)
    assert (seen.tokens, seen.parted, seen.worst) == (2, 1, 0.0)


def test_the_worst_difference_is_that_of_any_listed_token():
    assert compare({"a": [SURE]}, {"a": [entry((5, -0.11), (6, -3.02))]}, 0.05).worst == pytest.approx(0.02)


@pytest.mark.parametrize(
    "other",
    [
        entry((5, -0.2), (6, -3.0)),  # the same token, less likely
        entry((5, -0.1), (6, -2.9)),  # the same token, another one likelier
        entry((6, -0.7), (5, -0.71)),  # nearly tied in one run only
        entry((9, -0.1), (5, -0.11)),  # a token that the first run does not list
        entry((5, float("nan")), (6, -3.0)),
    ],
)
def test_anything_else_is_a_difference(other):
    for pair in (({"a": [SURE]}, {"a": [other]}), ({"a": [other]}, {"a": [SURE]})):
        with pytest.raises(DifferentError, match="a, token 0"):
            compare(*pair, 0.05)
