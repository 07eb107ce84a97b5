"""One engine's outlook by its promise and what was sent since: the formulas, on hand-made promises."""

from math import inf

import pytest

from roseinfer.core.promise import Promise
from roseinfer.router.base import Ask, Outlook
from roseinfer.router.view import MOST_SENT, EngineView
from tests.router.promises import promise


def view(published: Promise | None = None, *, share: int = 1, delay_s: float = 0.0) -> EngineView:
    made = EngineView(7, 1000, share, delay_s)
    if published is not None:
        made.update(published)
    return made


# --- formulas ---------------------------------------------------------------------------------------------------
def test_an_idle_engine() -> None:
    """Of 50 ms, 10 go to the step: .8 of the time is for 500 prompt tokens of .1 ms, and the step itself."""
    ask = Ask(500, output_tokens=200, ttft_left_s=1.0, tpot_s=0.05)
    found = view(promise()).outlook(ask, 10.0, 0)
    assert found.engine == 7 and found.keeps and found.late_s == 0.0
    assert found.ttft_s == pytest.approx(0.010 + 0.050 / 0.8)
    assert found.utilisation == pytest.approx(0.2 + (1e-4 + 1e-6 * 600) / 0.05)
    assert found.extra == 0.0, "nobody else is there to pay for its pace"


def test_the_rest_of_the_step_is_waited_for() -> None:
    made, ask = view(promise(10.0, step_s=0.2)), Ask(100, ttft_left_s=1.0)
    now = made.outlook(ask, 10.05, 0).ttft_s
    assert now == pytest.approx(0.15 + 0.010 + 0.010)
    assert made.outlook(ask, 10.5, 0).ttft_s == pytest.approx(0.020), "the step is over"


def test_prompts_that_are_due_before_it_come_first() -> None:
    made = view(promise(fill_tokens=100, waiting_tokens={0: 1000, 4: 2000, 7: 5000}))
    times = [made.outlook(Ask(100, ttft_left_s=left_s), 10.0, 0).ttft_s for left_s in (0.04, 0.3, 0.7, 2.0, inf)]
    ahead = [1100, 1100, 3100, 3100, 8100]
    assert times == pytest.approx([0.010 + (tokens + 100) * 1e-4 for tokens in ahead])
    assert made.outlook(Ask(100, ttft_left_s=0.3), 10.4, 0).ttft_s == pytest.approx(0.010 + 3200 * 1e-4), "due at 10.7"


def test_what_is_cached_is_not_computed() -> None:
    made, ask = view(promise()), Ask(1000, ttft_left_s=1.0)
    assert made.outlook(ask, 10.0, 0).ttft_s - made.outlook(ask, 10.0, 900).ttft_s == pytest.approx(0.090)
    assert made.outlook(ask, 10.0, 900).cached_tokens == 900


def test_the_tightest_pace_sets_how_often_steps_are_paid() -> None:
    """Both directions: a tight one among the loose costs these more; a loose one pays the pace that is there."""
    loose, tight = view(promise(smallest_s=0.1, busy=0.3)), view(promise(smallest_s=0.02, busy=0.3))
    ask = Ask(100, output_tokens=0, ttft_left_s=1.0, tpot_s=0.02)
    own = (1e-4 + 1e-6 * 100) / 0.02
    assert loose.outlook(ask, 10.0, 0).extra == pytest.approx(0.5 - 0.1)
    assert tight.outlook(ask, 10.0, 0).extra == 0.0
    for made in (loose, tight):
        assert made.outlook(ask, 10.0, 0).utilisation == pytest.approx(0.5 + 0.3 + own)
        assert made.outlook(ask, 10.0, 0).ttft_s == pytest.approx(0.010 + 0.010 / 0.2)
    other = ask._replace(tpot_s=0.1)
    assert tight.outlook(other, 10.0, 0).utilisation == pytest.approx(0.5 + 0.3 + own / 5)


def test_prompts_get_a_least_share_of_a_full_engine() -> None:
    made = view(promise(smallest_s=0.02, busy=2.0))
    found = made.outlook(Ask(130, ttft_left_s=0.05, tpot_s=0.05), 10.0, 0)
    assert found.ttft_s == pytest.approx(0.010 + 0.013 / 0.13)
    assert found.late_s == pytest.approx(found.ttft_s - 0.05) and not found.keeps


def test_what_is_kept_back_is_not_there() -> None:
    full = promise(keep=0.8, busy=0.3, weights=0.1, arriving=0.2)
    found = view(full).outlook(Ask(100, ttft_left_s=1.0), 10.0, 0)
    assert found.utilisation == pytest.approx(0.6 / 0.8)
    assert found.ttft_s == pytest.approx(0.010 + 0.010 / 0.5)


def test_the_engine_s_guess_of_a_length_stands_in_for_none() -> None:
    made = view(promise(output_tokens=400.0))
    ask = Ask(100, tpot_s=0.05)
    assert made.outlook(ask, 10.0, 0) == made.outlook(ask._replace(output_tokens=400), 10.0, 0)


def test_whose_blocks_are_more_used_than_its_time_is_as_full_as_these() -> None:
    """Of what is expected to be added half is there at once: 300 blocks now, 100 then, 25 and 25 of its own."""
    made = view(promise(blocks=1000, free_blocks=700, growth_blocks=200))
    ask = Ask(400, output_tokens=800, ttft_left_s=1.0)
    assert made.utilisation == pytest.approx(0.4)
    assert made.outlook(ask, 10.0, 0).utilisation == pytest.approx(0.45)
    assert made.outlook(ask, 10.0, 320).utilisation == pytest.approx(0.43), "what is cached needs no blocks"
    busy = view(promise(blocks=1000, free_blocks=700, growth_blocks=200, busy=0.6))
    assert busy.utilisation == pytest.approx(0.6) and busy.outlook(ask, 10.0, 0).utilisation == pytest.approx(0.6)
    made.send(ask, 0, 10.0)
    assert made.utilisation == pytest.approx(0.45)


def test_whose_seats_are_more_used_than_its_time_is_as_full_as_these() -> None:
    made = view(promise(running=12, waiting=3, free_seats=8, busy=0.2))
    ask = Ask(400, ttft_left_s=1.0)
    assert made.utilisation == pytest.approx(15 / 20) and made.outlook(ask, 10.0, 0).utilisation == pytest.approx(0.8)
    made.send(ask, 0, 10.0)
    assert made.utilisation == pytest.approx(0.8)
    assert view(promise(free_seats=0)).utilisation == 0.0, "nothing is known of its seats"


def test_objectives_of_nothing_are_no_division_by_zero() -> None:
    found = view(promise()).outlook(Ask(100, ttft_left_s=0.0, tpot_s=0.0), 10.0, 0)
    assert not found.keeps


def test_an_engine_that_was_not_heard_of() -> None:
    made = view()
    assert not made.priced and made.load == (0, 0) and made.takes
    assert made.outlook(Ask(100, ttft_left_s=1.0), 10.0, 0) == Outlook(7)


def test_what_an_idle_engine_could_keep() -> None:
    made = view(promise(smallest_s=0.01, busy=3.0))
    assert made.idle_keeps(Ask(1000, ttft_left_s=0.12, tpot_s=0.012))
    assert not made.idle_keeps(Ask(1000, ttft_left_s=0.10, tpot_s=0.012))
    assert not made.idle_keeps(Ask(1000, ttft_left_s=0.12, tpot_s=0.011))


def test_a_deadline_for_the_whole_request_asks_for_a_first_token_and_a_pace() -> None:
    """A tenth of 6 s is the prompt's; 200 tokens may be 300."""
    ask = Ask(100, output_tokens=200, end_left_s=6.0)
    assert ask.promised and ask.needs(200) == pytest.approx((0.6, 0.018))
    made = view(promise(smallest_s=0.1, busy=0.2))
    same = made.outlook(Ask(100, output_tokens=200, ttft_left_s=0.6, tpot_s=0.018), 10.0, 0)
    assert made.outlook(ask, 10.0, 0) == pytest.approx(same)
    assert ask._replace(ttft_left_s=0.2, tpot_s=0.01).needs(200) == (0.2, 0.01), "its own come first"
    assert ask._replace(end_left_s=-1.0).needs(200)[1] > 0


# --- dead reckoning ---------------------------------------------------------------------------------------------
ASK = Ask(1000, output_tokens=0, ttft_left_s=0.5, tpot_s=0.05)


def test_what_was_sent_counts_for_all_processes_until_a_promise_counts_it() -> None:
    made = view(promise(10.0, smallest_s=0.1), share=4)
    before = made.outlook(ASK, 10.01, 0)
    made.send(ASK, 200, 10.01)
    after = made.outlook(ASK, 10.01, 0)
    assert made.load == (4, 0)
    assert after.ttft_s - before.ttft_s == pytest.approx(4 * 800 * 1e-4 / 0.8)
    arriving = 4 * 800 * 1e-4 / 10
    assert after.utilisation - before.utilisation == pytest.approx(4 * (1e-4 + 1e-3) / 0.05 + arriving)
    assert (before.extra, after.extra) == (pytest.approx(0.1), 0.0), "its pace is there now"
    made.update(promise(10.005))
    assert made.outlook(ASK, 10.01, 0) == after, "that promise was made before"
    made.update(promise(10.02))
    assert made.outlook(ASK, 10.02, 0).utilisation == before.utilisation and made.load == (0, 0)


def test_each_sample_has_a_row_and_all_have_one_prompt() -> None:
    """Beside one request alone, three more samples cost three rows, seats and outputs, and no time to the first."""
    one = Ask(800, output_tokens=320, ttft_left_s=0.5, tpot_s=0.05)
    four = one._replace(samples=4)
    weight = (1e-4 + 1e-6 * (800 + 160)) / 0.05
    made = view(promise(10.0))
    alone, found = made.outlook(one, 10.0, 0), made.outlook(four, 10.0, 0)
    assert found.ttft_s == alone.ttft_s and found.utilisation - alone.utilisation == pytest.approx(3 * weight)
    made = view(promise(10.0, free_seats=10))
    assert made.outlook(four, 10.0, 0).utilisation == 0.4
    made = view(promise(10.0, blocks=200, free_blocks=200))
    assert made.outlook(four, 10.0, 0).utilisation == pytest.approx((50 + 4 * 10) / 200)
    made.send(four, 0, 10.0)
    assert made.load == (4, 0) and made.utilisation == pytest.approx((50 + 4 * 10) / 200)
    made = view(promise(10.0))
    made.send(four._replace(ttft_left_s=inf, tpot_s=inf), 0, 10.0)
    assert made.best_effort == 4


def test_who_asks_for_the_impossible_fills_no_engine() -> None:
    """It is refused at once, and others must not be kept away until then."""
    made = view(promise(10.0, smallest_s=0.1))
    made.send(ASK._replace(tpot_s=1e-9), 0, 10.0)
    assert made.utilisation < 1.2


def test_an_engine_that_has_published_since_looks_as_one_that_has_not() -> None:
    """Prompts that it has begun count as arriving, by what they take over ten seconds; .35 at most."""
    silent, heard = view(promise(10.0)), view(promise(10.0))
    ask = Ask(1000, ttft_left_s=1.0)
    for number in range(20):
        silent.send(ask, 0, 10.001 + number * 1e-4)
    heard.update(promise(10.01, arriving=20 * 0.1 / 10, fill_tokens=20_000, running=20))
    assert silent.utilisation == pytest.approx(heard.utilisation) == pytest.approx(0.2)
    for number in range(200):
        silent.send(ask, 0, 10.01 + number * 1e-4)
    assert silent.outlook(Ask(1), 10.05, 0).utilisation == pytest.approx(0.35)


def test_what_is_on_its_way_is_in_no_promise() -> None:
    made = view(promise(10.0), delay_s=0.002)
    made.send(ASK, 0, 10.010)
    made.update(promise(10.011))
    assert made.load == (1, 0)
    made.update(promise(10.013))
    assert made.load == (0, 0)


def test_those_with_later_due_times_are_not_in_its_way() -> None:
    made = view(promise(10.0))
    before = made.outlook(ASK, 10.0, 0)
    made.send(ASK._replace(ttft_left_s=5.0), 0, 10.0)
    assert made.outlook(ASK, 10.0, 0).ttft_s == pytest.approx(before.ttft_s)
    assert made.outlook(ASK._replace(ttft_left_s=5.0), 10.0, 0).ttft_s > before.ttft_s + 0.1


def test_best_effort_is_counted_apart() -> None:
    made = view(promise(10.0, best_effort=2, waiting=5), share=3)
    made.send(Ask(10), 0, 10.0)
    made.send(ASK, 0, 10.0)
    assert made.best_effort == 5 and made.load == (11, 0)


def test_a_silent_engine_does_not_fill_the_memory() -> None:
    made, apart = view(promise(10.0)), view(promise(10.0))
    for number in range(3 * MOST_SENT):
        made.send(ASK, 0, 10.0 + number)
    assert len(made._sent) == MOST_SENT and made.load == (3 * MOST_SENT, 0)
    made.update(promise(10.0 + MOST_SENT))
    assert made.load[0] >= 2 * MOST_SENT - 1, "those since then still count"
    made.update(promise(10.0 + 3 * MOST_SENT))
    assert made.load == (0, 0) and made.utilisation == apart.utilisation


def test_a_new_engine_knows_nothing_of_the_old_one() -> None:
    made = view(promise(10.0, busy=0.5))
    made.send(Ask(160, range(10), ttft_left_s=1.0), 0, 10.0)
    assert made.held_tokens(Ask(160, range(10))) == 160
    made.forget()
    assert made.promise is None and made.load == (0, 0) and made.utilisation == 0.0
    assert made.held_tokens(Ask(160, range(10))) == 0
