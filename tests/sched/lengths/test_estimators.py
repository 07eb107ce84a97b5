"""Estimates of output lengths."""

import random

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.lengths.estimators import (
    LENGTH_ESTIMATORS,
    MAX_LENGTHS,
    CalibratedLengths,
    EcdfLengths,
    OracleLengths,
    make_lengths,
)
from roseinfer.sched.policies.slack.policy import SlackPolicy
from roseinfer.sched.registry import make_policy, scheduler_config


def request(predicted: int | None = None, max_tokens: int = 2000) -> Request:
    return Request("a", Prompt([1] * 10, SequenceParams(max_tokens=max_tokens), RequestMeta(predicted_len=predicted)))


def test_the_oracle_knows() -> None:
    assert OracleLengths().total(request(300)) == 300
    assert OracleLengths().left(request(300), 100) == 200
    assert OracleLengths().total(request(max_tokens=50)) == 50
    assert OracleLengths().total(request(2**31, max_tokens=50)) == 50, "what a client says cannot stop the others"


def test_a_prediction_counts_down_and_what_outlives_it_may_be_anything() -> None:
    lengths = CalibratedLengths(EcdfLengths())
    assert lengths.total(request(300)) == 300
    assert lengths.left(request(300), 100) == 200
    assert lengths.left(request(300), 299) == 8
    assert lengths.left(request(300), 700) == pytest.approx(EcdfLengths().left(request(), 700)), "nothing is known"


@pytest.mark.parametrize("predicted", [None, 100])
def test_what_most_similar_requests_do_not_exceed_is_known_from_those_that_got_as_far(predicted: int | None) -> None:
    lengths = CalibratedLengths(EcdfLengths())
    for number in range(3000):
        lengths.finished(request(predicted), 100 + number % 100)
    assert lengths.left(request(predicted), 1, 0.9) == pytest.approx(190, abs=10)
    assert lengths.left(request(predicted), 150, 0.9) == pytest.approx(45, abs=8)
    assert lengths.left(request(predicted, max_tokens=150), 1, 0.9) == 149
    assert OracleLengths().left(request(100), 40, 0.9) == 60


def test_a_request_that_only_its_limit_ends_needs_no_prediction() -> None:
    lengths = CalibratedLengths(EcdfLengths())
    for stop, total in (((), 700.0), (("end",), 300.0)):
        params = SequenceParams(max_tokens=700, ignore_eos=True, stop=stop)
        fixed = Request("a", Prompt([1], params, RequestMeta(predicted_len=300)))
        assert lengths.total(fixed) == total
        assert lengths.left(fixed, 100) == total - 100
    assert (
        lengths.total(Request("a", Prompt([1], SequenceParams(max_tokens=700), RequestMeta(predicted_len=300)))) == 300
    )


def test_no_estimate_goes_beyond_max_tokens() -> None:
    lengths = CalibratedLengths(EcdfLengths())
    assert lengths.total(request(300, max_tokens=40)) == 40
    assert lengths.left(request(300, max_tokens=40), 39) == 1
    assert lengths.total(request(max_tokens=40)) == 40
    assert lengths.left(request(max_tokens=40), 35) <= 5


def test_no_prediction_is_below_what_the_request_itself_asks_for() -> None:
    params = SequenceParams(max_tokens=700, min_tokens=200)
    assert make_lengths("classifier").total(Request("a", Prompt([1], params, RequestMeta(predicted_len=1)))) == 200


def test_without_a_prediction_the_finished_ones_tell() -> None:
    lengths, rng = EcdfLengths(), random.Random(0)
    before = lengths.total(request())
    for _ in range(3000):
        lengths.finished(request(), rng.randrange(90, 111))
    assert before > 400
    assert lengths.total(request()) == pytest.approx(100, abs=3)
    assert lengths.left(request(), 10) == pytest.approx(90, abs=4)
    assert lengths.left(request(max_tokens=10_000), 5000) == pytest.approx(1500), "nobody got that far: 30% more"


def test_the_longer_a_request_runs_the_more_a_heavy_tail_expects() -> None:
    lengths, rng = EcdfLengths(), random.Random(0)
    for _ in range(3000):
        lengths.finished(request(), round(rng.lognormvariate(5.5, 1.0)))
    left = [lengths.left(request(), outputs) for outputs in (100, 400, 1000)]
    assert left == sorted(left)


def test_the_table_is_bounded() -> None:
    lengths = EcdfLengths()
    for i in range(MAX_LENGTHS + 500):
        lengths.finished(request(), i)
    shares = [lengths.share_above(n) for n in range(-1, MAX_LENGTHS + 500)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    assert shares[-1] == 1 / (MAX_LENGTHS + 1)


def test_the_kinds_differ_in_what_they_make_of_a_prediction() -> None:
    known = {kind: make_lengths(kind) for kind in LENGTH_ESTIMATORS}
    assert known["oracle"].total(request(70)) == known["classifier"].total(request(70)) == 70
    assert known["oracle"].left(request(70), 69) == 1 and known["classifier"].left(request(70), 69) == 8
    assert known["ecdf"].total(request(70)) == known["ecdf"].total(request()) == known["classifier"].total(request())


def test_the_option_names_the_estimator() -> None:
    for kind in LENGTH_ESTIMATORS:
        policy = make_policy(scheduler_config(length_estimator=kind))
        assert isinstance(policy, SlackPolicy) and type(policy.state.lengths) is type(make_lengths(kind))
    with pytest.raises(ConfigError, match="length_estimator"):
        scheduler_config(length_estimator="tarot")
