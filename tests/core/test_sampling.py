"""Sampling parameters out of range are refused by name, whatever they are."""

import math

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.sampling import SamplingParams


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), True, "1", None])
def test_what_is_no_finite_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be a finite number") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [1.0, True, "1", -(2**70)])
def test_what_is_no_integer_in_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
