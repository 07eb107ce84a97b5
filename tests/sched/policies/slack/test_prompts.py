"""Prompts under slack: their order, their chunks, and which may start in addition to running ones."""

import pytest

from roseinfer.core.request import Request
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policy import Decision
from tests.sched.policies.slack.test_slack import state
from tests.sched.queues import State

# As COST, and 10 us for each token that a prompt token attends to.
PAIRS = CostParams(0.010, 0.001, 1e-5, 0.001, 0.0)
# As COST, and 10 us for each token before a chunk.
BEFORE = CostParams(0.010, 0.001, 0.0, 0.001, 0.0, 1e-5)


def chunks(made: State, decision: Decision) -> dict[str, int]:
    """Prompt tokens of each that starts or has started."""
    found = made.admitted(decision)
    for request in made.running:
        if request.remaining > 1:
            found[request.request_id] = decision.chunk(request, 10_000)
    return {name: tokens for name, tokens in found.items() if tokens}


def filling(made: State, name: str, prompt: int, *, planned: int = 0, **objectives: float) -> Request:
    request = made.wait(name, prompt, **objectives)
    made.start(request)
    request.planned = request.computed = planned
    return request


# --- their order --------------------------------------------------------------------------------------------------
def test_a_short_prompt_overtakes_a_long_one_that_fills() -> None:
    made = state(budget=600)
    filling(made, "long", 5000, ttft_s=60.0)
    made.wait("short", 500, ttft_s=5.0, tpot_s=0.050)
    assert chunks(made, made.begin()) == {"short": 500, "long": 100}


def test_but_not_one_that_is_due_sooner() -> None:
    made = state(budget=600)
    filling(made, "long", 2000, ttft_s=4.0)
    made.wait("short", 500, ttft_s=5.0, tpot_s=0.050)
    assert chunks(made, made.begin()) == {"long": 600}


def test_a_prompt_that_is_late_for_sure_comes_behind_those_that_are_not() -> None:
    made = state(budget=600)
    filling(made, "late", 2000, ttft_s=1.0)
    filling(made, "fine", 500, ttft_s=2.0)
    assert chunks(made, made.begin()) == {"fine": 500, "late": 100}


def test_one_that_only_its_margin_makes_late_keeps_its_turn() -> None:
    """A prompt whose 500 ms end 3 ms before its TTFT does, within the 5 ms for the way to the client."""
    made = state(budget=600)
    filling(made, "close", 500, ttft_s=0.503)
    filling(made, "fine", 500, ttft_s=2.0)
    assert chunks(made, made.begin()) == {"close": 500, "fine": 100}


def test_one_that_misses_a_short_objective_comes_last() -> None:
    """A prompt whose 20 ms end 2 ms after its TTFT does, which has a margin of 0.9 ms."""
    made = state(budget=36)
    filling(made, "late", 20, ttft_s=0.018)
    filling(made, "fine", 20, ttft_s=2.0)
    assert chunks(made, made.begin()) == {"fine": 20, "late": 16}


# --- who starts beside those that have ----------------------------------------------------------------------------
@pytest.mark.parametrize(("due_s", "starts"), [(6.0, True), (3.0, False)])
def test_a_prompt_that_starts_makes_no_other_in_line_late(due_s: float, starts: bool) -> None:
    """2 s of a prompt that fills and 2 s of one that would overtake it: both are in time by 6 s, but not by 3 s."""
    made = state()
    filling(made, "begun", 2000, ttft_s=due_s)
    made.wait("urgent", 2000, ttft_s=2.5)
    decision = made.begin()
    assert made.rejected(decision) == {}
    assert ("urgent" in chunks(made, decision)) == starts


def test_what_the_others_are_ahead_is_time_for_a_prompt() -> None:
    """A row that needs a step of 10 ms every 12 leaves 0.3 s of 2, and all but some steps if it is 5 s ahead."""

    def rejected(tokens_ahead: int) -> bool:
        made = state()
        row = made.run("row", tpot_s=0.012, predicted=900)
        row.tokens += [1] * tokens_ahead
        row.planned = row.computed = len(row.tokens) - 1
        made.wait("prompt", 1000, ttft_s=2.0)
        return "prompt" in made.rejected(made.begin())

    assert (rejected(0), rejected(420)) == (True, False)


def test_prompts_that_start_sooner_count_against_the_time_of_a_later_one() -> None:
    """2 s of one that has started, .5 s of a shorter one, and 1.5 s of its own."""
    made = state()
    filling(made, "begun", 2000, ttft_s=2.9)
    made.wait("behind", 1500, ttft_s=3.0)
    made.wait("beside", 500, ttft_s=3.0)
    found = made.rejected(made.begin())
    assert found["behind"].predicted_ttft_s == pytest.approx(4.0, rel=0.05)
    assert not found["behind"].hopeless
    assert list(found) == ["behind"]


def test_requests_that_take_what_is_left_count_against_it_too() -> None:
    """100 rows of 1 ms in each step of 2,048 tokens of 1 ms: a prompt of 2 s takes 5% longer."""

    def rejected(rows: int) -> bool:
        made = state()
        for i in range(rows):
            made.run(f"{i}", ttft_s=1.0)
        made.wait("prompt", 2000, ttft_s=2.05)
        return "prompt" in made.rejected(made.begin())

    assert (rejected(0), rejected(100)) == (False, True)


# --- what pairs cost ----------------------------------------------------------------------------------------------
def test_a_chunk_is_shorter_the_more_tokens_it_attends_to() -> None:
    """The 39 ms that are left of 50: 34 tokens and their pairs at the start, but at position 3,000 one takes 31 ms."""

    def chunk(planned: int) -> int:
        made = state(PAIRS)
        made.run("a", tpot_s=0.050)
        filling(made, "long", 3100, planned=planned, ttft_s=9.0)
        return chunks(made, made.begin())["long"]

    for planned in (0, 500, 1000):
        tokens = chunk(planned)
        assert PAIRS.prefill_s(planned, tokens) <= 0.039 < PAIRS.prefill_s(planned, tokens + 1)
    assert chunk(0) > 5 * chunk(500)


def test_no_chunk_that_would_spend_much_of_its_time_on_what_is_before_it() -> None:
    """39 of 50 ms are left. A chunk after 900 tokens spends 9 of them on these, one after 3,000 tokens 30."""

    def chunk(planned: int, *, left: int = 100, ttft_s: float = 9.0) -> int:
        made = state(BEFORE)
        made.run("a", tpot_s=0.050)
        filling(made, "long", planned + left, planned=planned, ttft_s=ttft_s)
        return chunks(made, made.begin()).get("long", 0)

    assert chunk(900) == pytest.approx(30, abs=2)
    assert chunk(3000) == 0
    assert chunk(3000, left=5) == 5, "the last one"
    assert chunk(3000, ttft_s=0.15) > 0, "it is about to be late"


def test_the_pairs_of_a_prompt_count_in_whether_it_can_be_in_time() -> None:
    """1,000 tokens of 1 ms, and half a million pairs of 10 us."""
    made = state(PAIRS)
    made.wait("long", 1000, ttft_s=5.0)
    assert made.rejected(made.begin())["long"].predicted_ttft_s == pytest.approx(6.0, rel=0.05)
    made = state(PAIRS)
    made.wait("long", 1000, ttft_s=6.5)
    assert chunks(made, made.begin()) == {"long": 1000}


# --- what prompts to come are taken for ---------------------------------------------------------------------------
def test_one_long_prompt_says_little_of_those_to_come() -> None:
    made = state()
    filling(made, "long", 10_000, ttft_s=60.0)
    assert made.policy.state.arriving(0.0) == pytest.approx(0.2 / 10), "as one of 200 ms, within 10 s"


def test_many_short_ones_say_as_much_as_they_take() -> None:
    made = state()
    for i in range(200):
        made.now_s = 0.5 * i
        filling(made, f"{i}", 50, ttft_s=60.0)
    assert made.policy.state.arriving(made.now_s) == pytest.approx(0.05 / 0.5, rel=0.05)
    assert made.policy.state.arriving(made.now_s + 10.0) == pytest.approx(0.05 / 0.5 / 2.718, rel=0.05)


# --- a prompt at once ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("left", "others", "starts"),
    [
        pytest.param(400, 0, True, id="the row makes up for it"),
        pytest.param(5, 0, False, id="the row ends before it could"),
        pytest.param(400, 1, False, id="another one waits as well"),
    ],
)
def test_a_lone_prompt_is_computed_at_once_if_others_can_make_up_for_it(left: int, others: int, starts: bool) -> None:
    """Steps of 20 ms leave 9 ms: 100 ms of prompt would take 220 ms of its 150 ms. At once it takes 111 ms, for which
    the row makes up by 9 ms in each further step.
    """
    made = state()
    made.run("row", tpot_s=0.020, predicted=left)
    for number in range(others):
        made.wait(f"{number}", 10, ttft_s=9.0)
    made.wait("prompt", 100, ttft_s=0.150, tpot_s=0.020)
    decision = made.begin()
    assert (chunks(made, decision).get("prompt") == 100) is starts
    assert ("prompt" in made.rejected(decision)) is not starts


# --- the end of a step that a first token waits for ---------------------------------------------------------------
def test_a_first_token_is_planned_to_end_before_it_is_due_with_a_reserve() -> None:
    """A prompt of 20 ms due in 55 ms, and one of 500 ms beside: a step of 50 ms, although tokens ahead would allow 150.
    A step may take 1.1 times as long as planned, and the last twentieth of the objective is for the way to the client.
    """
    made = state()
    ahead = made.run("a", tpot_s=0.050)
    ahead.tokens += [1, 1]
    ahead.planned = ahead.computed = len(ahead.tokens) - 1
    filling(made, "due", 20, ttft_s=0.055 / 0.95)
    filling(made, "long", 500, ttft_s=9.0)
    assert chunks(made, made.begin()) == {"due": 20, "long": 19}, "10 ms for the step and 1 for the row"


def test_without_one_the_step_is_as_long_as_tokens_allow() -> None:
    made = state()
    ahead = made.run("a", tpot_s=0.050)
    ahead.tokens += [1, 1]
    ahead.planned = ahead.computed = len(ahead.tokens) - 1
    filling(made, "due", 20, ttft_s=5.0)
    filling(made, "long", 500, ttft_s=9.0)
    assert chunks(made, made.begin()) == {"due": 20, "long": 119}
