"""Objectives for a whole request under slack: deadlines, from which a pace follows."""

import pytest

from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.lengths.estimators import CalibratedLengths, EcdfLengths
from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.slack.deadlines import measure, pace_outlived
from roseinfer.sched.policy import Ended
from tests.sched.policies.slack.test_slack import state
from tests.sched.queues import State


def decoding(made: State, request: Request) -> Track:
    made.begin()
    return made.policy.state.ledger.decoding[request.request_id]


def grow(request: Request, outputs: int) -> None:
    request.tokens += [1] * outputs
    request.planned = request.computed = len(request.tokens) - 1


def test_the_pace_is_what_is_left_over_the_tokens_that_are_left() -> None:
    made = state()
    request = made.run("a", e2e_s=10.0, predicted=101, first_s=4.0)
    assert decoding(made, request).tpot_s == pytest.approx(6.0 / 100, rel=0.01)


def test_a_near_first_token_comes_before_a_far_deadline() -> None:
    made = state(seats=1)
    made.wait("far", e2e_s=40.0, predicted=50)
    made.now_s = 5.0
    made.wait("near", ttft_s=2.0, tpot_s=0.100, predicted=50)
    assert list(made.admitted(made.begin())) == ["near"]


def test_an_early_first_token_leaves_more_for_the_others() -> None:
    made = state()
    request = made.run("a", e2e_s=10.0, predicted=101, first_s=1.0)
    assert decoding(made, request).tpot_s == pytest.approx(9.0 / 100, rel=0.01)


def test_a_pace_of_its_own_is_kept_if_it_is_faster() -> None:
    made = state()
    request = made.run("a", e2e_s=10.0, tpot_s=0.050, predicted=101, first_s=1.0)
    assert decoding(made, request).tpot_s == 0.050


def test_its_first_token_is_due_so_that_the_others_are_in_time() -> None:
    """100 tokens at 1.1 times steps of 11 ms take 1.21 s, the rest is left for the prompt: a tenth at least."""
    made = state()
    for name, e2e_s in (("far", 10.0), ("near", 1.1)):
        made.wait(name, e2e_s=e2e_s, predicted=100)
    waiting = made.policy.state.ledger.waiting
    assert waiting["far"].due_s == pytest.approx(10.0 - 1.21)
    assert waiting["near"].due_s == pytest.approx(0.11)


@pytest.mark.parametrize(("error", "tokens"), [(20.0, 100 + 20), (256.0, 100 + 64)])
def test_what_lengths_are_wrong_by_is_planned_for_within_reason(error: float, tokens: int) -> None:
    """A step is assumed to take 1.1 times its 11 ms."""
    made = state()
    made.policy.state.length_error = error
    made.wait("a", e2e_s=10.0, predicted=100)
    assert made.policy.state.ledger.waiting["a"].due_s == pytest.approx(10.0 - tokens * 1.1 * 0.011)


def test_no_output_is_planned_for_beyond_max_tokens() -> None:
    made = state()
    made.policy.state.length_error = 256.0
    made.wait("a", e2e_s=1.0, predicted=8, max_tokens=10)
    assert made.policy.state.ledger.waiting["a"].due_s == pytest.approx(1.0 - 10 * 1.1 * 0.011)


def test_the_pace_suffices_for_most_outputs_of_which_as_much_was_predicted() -> None:
    """One in five is four times as long as predicted. The expected length is 160, but 90% have at most 400."""
    lengths = CalibratedLengths(EcdfLengths())
    for number in range(200):
        hint = RequestMeta(predicted_len=80 + number % 41)
        past = Request("past", Prompt([1], SequenceParams(max_tokens=2000), hint))
        lengths.finished(past, 400 if number % 5 == 0 else 100)
    made = state(lengths=lengths)
    request = made.run("a", e2e_s=20.0, predicted=100, first_s=2.0)
    track = decoding(made, request)
    assert track.length < 200
    assert track.tpot_s == pytest.approx(18.0 / 399, rel=0.03)


def test_while_it_waits_it_is_judged_by_the_pace_of_its_expected_length() -> None:
    """An allowance for the error of that length would keep out requests that fit."""
    made = state()
    made.policy.state.length_error = 50.0
    made.wait("a", e2e_s=10.0, predicted=100)
    assert made.policy.state.ledger.waiting["a"].tpot_s == pytest.approx(0.9 * 10.0 / 100)


@pytest.mark.parametrize(("now_s", "pace_s"), [(3.0, 7.0 / 30), (6.0, 4.0 / 30)])
def test_who_outlives_its_length_gets_another_pace(now_s: float, pace_s: float) -> None:
    """30 more in what is left of its time."""
    made = state()
    request = made.run("a", e2e_s=10.0, predicted=51, first_s=0.001)
    track = decoding(made, request)
    assert track.tpot_s == pytest.approx(9.999 / 50, rel=0.01)
    grow(request, 50)
    made.now_s = now_s
    made.policy.state.lengths.left = lambda request, outputs, share=None: 30.0
    made.begin()
    assert track.tpot_s == pytest.approx(pace_s, rel=0.01)
    assert track.anchor_s + track.pace_s * len(track.tokens) == pytest.approx(now_s, abs=0.1), "counted from now on"


@pytest.mark.parametrize("end", ["lost", "aborted"])
def test_many_leave_the_batch_at_once_in_linear_time(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a pace of its own, so each is the fastest before it leaves."""
    made, count = state(), 100
    for i in range(count):
        decoding(made, made.run(f"{i}", e2e_s=10.0 + i / 100, predicted=51, first_s=0.001))
    kept = decoding(made, made.run("kept", e2e_s=1000.0, predicted=51, first_s=0.001))
    read: list[Track] = []
    pace = Track.step_pace_s.fget
    assert pace is not None
    monkeypatch.setattr(Track, "step_pace_s", property(lambda track: read.append(track) or pace(track)))
    if end == "lost":
        measure(made.policy.state, 20.0)
    for i in range(count if end == "aborted" else 0):
        made.policy.observe(Ended(f"{i}", 0.0, FinishReason.ABORT, 0))
    batch = made.policy.state.batch
    assert list(batch) == [kept] and batch.tokens_per_s == pytest.approx(1 / batch.smallest_s)
    assert 0 < len(read) < 20 * count


def test_many_that_outlive_their_lengths_in_one_step_are_paced_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their paces become slower one after the other, so each was the fastest before its turn."""
    made, count = state(), 100
    requests = [made.run(f"{i}", e2e_s=10.0 + i / 100, predicted=51, first_s=0.001) for i in range(count)]
    tracks = [decoding(made, request) for request in requests]
    for request in requests:
        grow(request, 50)
    made.policy.state.lengths.left = lambda request, outputs, share=None: 30.0
    read: list[Track] = []
    pace = Track.step_pace_s.fget
    assert pace is not None
    monkeypatch.setattr(Track, "step_pace_s", property(lambda track: read.append(track) or pace(track)))
    made.now_s = 3.0
    pace_outlived(made.policy.state, made.now_s)
    batch = made.policy.state.batch
    assert list(batch) == tracks, "in their order"
    assert batch.smallest_s == pytest.approx(7.0 / 30)
    assert batch.tokens_per_s == pytest.approx(sum(30 / (7.0 + i / 100) for i in range(count)))
    assert 0 < len(read) < 10 * count


def test_the_price_of_a_pace_bounds_it() -> None:
    """Three seconds for 100 tokens would need one every 30 ms, and that is not worth its cost at present."""
    made = state()
    request = made.run("a", e2e_s=3.1, predicted=101, first_s=0.1)
    track = decoding(made, request)
    assert track.tpot_s == pytest.approx(3.0 / 100, rel=0.01)
    made.policy.state.price.pace_s = 0.040
    made.begin()
    assert track.tpot_s == pytest.approx(0.040)


def test_no_end_holds_the_others_to_a_pace_faster_than_every_other_step_of_an_idle_machine() -> None:
    made = state()
    request = made.run("a", e2e_s=1.0, predicted=1000, first_s=0.1)
    assert decoding(made, request).tpot_s == pytest.approx(2 * 0.011)


def test_an_end_that_nobody_could_reach_is_refused() -> None:
    """200 steps of 11 ms."""
    made = state()
    made.policy.state.cost.steps = 50
    made.wait("a", 10, e2e_s=2.0, predicted=200)
    made.wait("b", 10, e2e_s=2.5, predicted=200)
    assert list(made.rejected(made.begin())) == ["a"]
