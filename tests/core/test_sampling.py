"""Sampling parameters out of range are refused by name, whatever they are."""

import dataclasses
import math

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.sampling import SequenceParams


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), True, "1", None])
def test_what_is_no_finite_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be a finite number") as caught:
        SequenceParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", (-1,)), ("stop_token_ids", (True,)),
        ("allowed_token_ids", ()), ("allowed_token_ids", (3, -1)), ("allowed_token_ids", (1.0,)),
        ("bad_words", ("fine", "")), ("bad_words", (3,)),
        ("bad_token_ids", ((),)), ("bad_token_ids", ((1, -1),)), ("bad_token_ids", ((1, "2"),)),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 1.0),
        ("logit_bias", ((-1, 0.0),)), ("logit_bias", ((1, 100.5),)), ("stop", ("a", "")), ("stop", ("a", 5)),
    ],
)  # fmt: skip
def test_wrong_entries_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SequenceParams(**{name: value})
    assert caught.value.param == name


def test_lists_are_taken_for_tuples() -> None:
    lists = SequenceParams(
        stop=["a"], stop_token_ids=[1], logit_bias=[], bad_words=["b"], bad_token_ids=[[1, 2]], allowed_token_ids=[3]
    )  # type: ignore[arg-type]
    tuples = SequenceParams(
        stop=("a",), stop_token_ids=(1,), bad_words=("b",), bad_token_ids=((1, 2),), allowed_token_ids=(3,)
    )
    assert lists == tuples and hash(lists) == hash(tuples)
    with pytest.raises(InvalidRequestError, match="stop must be a list"):
        SequenceParams(stop="abc")  # type: ignore[arg-type]


def test_every_list_of_token_ids_is_told_with_its_name() -> None:
    params = SequenceParams(
        stop_token_ids=(1,), logit_bias=((2, 1.0),), allowed_token_ids=(3,), bad_token_ids=((4, 5), (6,))
    )
    told = {name: list(ids) for name, ids in params.named_token_ids()}
    assert told == {"stop_token_ids": [1], "logit_bias": [2], "allowed_token_ids": [3], "bad_words": [4, 5, 6]}
    assert not [name for name, ids in SequenceParams().named_token_ids() if list(ids)]


def test_top_k_of_minus_one_is_off() -> None:
    assert SequenceParams(top_k=-1) == SequenceParams(top_k=0)
    with pytest.raises(InvalidRequestError, match=r"top_k must be within \[-1, "):
        SequenceParams(top_k=-2)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [1.0, True, "1", -(2**70)])
def test_what_is_no_integer_in_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be") as caught:
        SequenceParams(**{name: value})
    assert caught.value.param == name


def accepted(name: str, value: object, **others: object) -> tuple[object] | None:
    """Return what a field then holds, or None if its value is rejected."""
    try:
        return (getattr(SequenceParams(**{name: value, **others}), name),)
    except (InvalidRequestError, TypeError, ValueError):
        return None


ODD = (None, True, False, -1, 0, 1, 7, 17, 2**63, -(2**63) - 1, 10**400, 0.0, -0.01, 0.5, 1.0, 1.01, 2.0, 2.01, -2.01)
ODD += (101.0, math.inf, math.nan, "", "x", (), [], [1], (-1,), ("",), ((1,),), ((1, 2.0),), ((1, 101.0),))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SequenceParams)])
def test_a_value_is_valid_whatever_the_other_fields_are(name: str) -> None:
    """Parameters that are plain otherwise are only looked at quickly."""
    other = {"repetition_penalty": 1.5} if name == "presence_penalty" else {"presence_penalty": 0.5}
    found = [accepted(name, value) for value in ODD]
    assert repr(found) == repr([accepted(name, value, **other) for value in ODD])
    assert any(found)
