"""Objectives: what is refused, and when they are met."""

import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.outputs import End, FinishReason, RequestTimes
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Rejection, Slo
from roseinfer.engine.messages import Add


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", [1], 10**400])
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        Slo(**{name: value})
    assert caught.value.param == f"slo.{name}"


def test_met_needs_every_promise_kept() -> None:
    slo = Slo(1.0, 0.1, 5.0)
    assert slo.missed(1.0, 0.1, 5.0) == []
    assert slo.missed(1.01, 0.1, 5.0) == ["ttft"]
    assert slo.missed(1.0, 0.11, 5.0) == ["tpot"]
    assert slo.missed(1.0, 0.1, 5.1) == ["e2e"]
    assert Slo(ttft_s=1.0).missed(0.5, 9.0, 9.0) == []


def test_a_class_alone_promises_nothing() -> None:
    assert Slo(class_name="batch").empty
    assert not Slo(tpot_s=0.1).empty


def test_a_single_token_misses_no_tpot() -> None:
    slo = Slo(ttft_s=0.1, tpot_s=0.1, class_name="chat")
    assert slo.for_output(1) == Slo(ttft_s=0.1, class_name="chat")
    assert slo.for_output(2) is slo
    assert Slo(tpot_s=0.1, class_name="chat").for_output(1) is None


@pytest.mark.parametrize("ttft_s", [0.5, Fraction(1, 2), np.float32(0.5)])
def test_objectives_and_refusals_travel(ttft_s: Any) -> None:
    meta = RequestMeta(slo=Slo(ttft_s, None, 2, "chat"), tenant="t", deadline_s=9.0, predicted_len=7)
    add = Add("a", Prompt([1], SequenceParams(), meta))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(add), type=Add) == add
    end = End(FinishReason.REJECTED, RequestTimes(1.0, 0.0, 0.0, 2.0), rejection=Rejection("e2e", 0.7, Cause.IDLE))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(end), type=End)
    assert back == end and back.rejection is not None
    assert back.rejection.cause is Cause.IDLE and back.rejection.hopeless


@pytest.mark.parametrize("cause", Cause)
def test_only_what_an_idle_machine_would_miss_is_hopeless(cause: Cause) -> None:
    assert Rejection("ttft", 1.0, cause).hopeless == (cause is Cause.IDLE)
