"""Forecasts of one engine from hand-made promises and requests sent since."""

from math import inf

import pytest

from roseinfer.core.promise import Promise
from roseinfer.router.base import EngineForecast, RoutingRequest
from roseinfer.router.view import MAX_SENT_COUNT, EngineView
from tests.router.promises import promise, with_adapters


def view(published: Promise | None = None, *, share: int = 1, delay_s: float = 0.0) -> EngineView:
    made = EngineView(7, 1000, share, delay_s)
    if published is not None:
        made.update(published)
    return made


# --- formulas ---------------------------------------------------------------------------------------------------
def test_an_idle_engine() -> None:
    """10 of 50 ms are the step's constant cost, so .8 of the time is for 500 prompt tokens of .1 ms."""
    ask = RoutingRequest(500, output_tokens=200, ttft_left_s=1.0, tpot_s=0.05)
    found = view(promise()).forecast(ask, 10.0, 0)
    assert found.engine == 7 and found.meets_objectives and found.late_s == 0.0
    assert found.ttft_s == pytest.approx(0.010 + 0.050 / 0.8)
    assert found.utilisation == pytest.approx(0.2 + (1e-4 + 1e-6 * 600) / 0.05)
    assert found.pace_cost == 0.0, "no other request pays for its pace"


def test_the_rest_of_the_current_step_counts() -> None:
    made, ask = view(promise(10.0, step_s=0.2)), RoutingRequest(100, ttft_left_s=1.0)
    now = made.forecast(ask, 10.05, 0).ttft_s
    assert now == pytest.approx(0.15 + 0.010 + 0.010)
    assert made.forecast(ask, 10.5, 0).ttft_s == pytest.approx(0.020), "the step is over"


def test_prompts_that_are_due_earlier_come_first() -> None:
    made = view(promise(fill_tokens=100, waiting_tokens={0: 1000, 4: 2000, 7: 5000}))
    times = [
        made.forecast(RoutingRequest(100, ttft_left_s=left_s), 10.0, 0).ttft_s for left_s in (0.04, 0.3, 0.7, 2.0, inf)
    ]
    ahead = [1100, 1100, 3100, 3100, 8100]
    assert times == pytest.approx([0.010 + (tokens + 100) * 1e-4 for tokens in ahead])
    assert made.forecast(RoutingRequest(100, ttft_left_s=0.3), 10.4, 0).ttft_s == pytest.approx(0.010 + 3200 * 1e-4), (
        "due at 10.7"
    )


def test_cached_tokens_are_not_computed() -> None:
    made, ask = view(promise()), RoutingRequest(1000, ttft_left_s=1.0)
    assert made.forecast(ask, 10.0, 0).ttft_s - made.forecast(ask, 10.0, 900).ttft_s == pytest.approx(0.090)
    assert made.forecast(ask, 10.0, 900).cached_tokens == 900


def test_the_tightest_pace_sets_how_often_steps_are_paid() -> None:
    """A tight request costs loose ones more; a loose request pays the engine's current pace."""
    loose, tight = view(promise(smallest_s=0.1, busy=0.3)), view(promise(smallest_s=0.02, busy=0.3))
    ask = RoutingRequest(100, output_tokens=0, ttft_left_s=1.0, tpot_s=0.02)
    own = (1e-4 + 1e-6 * 100) / 0.02
    assert loose.forecast(ask, 10.0, 0).pace_cost == pytest.approx(0.5 - 0.1)
    assert tight.forecast(ask, 10.0, 0).pace_cost == 0.0
    for made in (loose, tight):
        assert made.forecast(ask, 10.0, 0).utilisation == pytest.approx(0.5 + 0.3 + own)
        assert made.forecast(ask, 10.0, 0).ttft_s == pytest.approx(0.010 + 0.010 / 0.2)
    other = ask._replace(tpot_s=0.1)
    assert tight.forecast(other, 10.0, 0).utilisation == pytest.approx(0.5 + 0.3 + own / 5)


def test_prompts_get_a_minimum_share_of_a_full_engine() -> None:
    made = view(promise(smallest_s=0.02, busy=2.0))
    found = made.forecast(RoutingRequest(130, ttft_left_s=0.05, tpot_s=0.05), 10.0, 0)
    assert found.ttft_s == pytest.approx(0.010 + 0.013 / 0.13)
    assert found.late_s == pytest.approx(found.ttft_s - 0.05) and not found.meets_objectives


def test_the_engine_s_margin_is_not_available() -> None:
    full = promise(usable_share=0.8, busy=0.3, weights=0.1, arriving=0.2)
    found = view(full).forecast(RoutingRequest(100, ttft_left_s=1.0), 10.0, 0)
    assert found.utilisation == pytest.approx(0.6 / 0.8)
    assert found.ttft_s == pytest.approx(0.010 + 0.010 / 0.5)


def test_the_engine_s_length_estimate_is_the_default() -> None:
    made = view(promise(output_tokens=400.0))
    ask = RoutingRequest(100, tpot_s=0.05)
    assert made.forecast(ask, 10.0, 0) == made.forecast(ask._replace(output_tokens=400), 10.0, 0)


def test_utilisation_is_that_of_blocks_if_higher() -> None:
    """Half of the expected growth counts: 300 blocks now, 100 later, 25 and 25 of the request."""
    made = view(promise(blocks=1000, free_blocks=700, growth_blocks=200))
    ask = RoutingRequest(400, output_tokens=800, ttft_left_s=1.0)
    assert made.utilisation == pytest.approx(0.4)
    assert made.forecast(ask, 10.0, 0).utilisation == pytest.approx(0.45)
    assert made.forecast(ask, 10.0, 320).utilisation == pytest.approx(0.43), "what is cached needs no blocks"
    busy = view(promise(blocks=1000, free_blocks=700, growth_blocks=200, busy=0.6))
    assert busy.utilisation == pytest.approx(0.6) and busy.forecast(ask, 10.0, 0).utilisation == pytest.approx(0.6)
    made.on_sent(ask, 0, 10.0)
    assert made.utilisation == pytest.approx(0.45)


def test_utilisation_is_that_of_seats_if_higher() -> None:
    made = view(promise(running=12, waiting=3, free_seats=8, busy=0.2))
    ask = RoutingRequest(400, ttft_left_s=1.0)
    assert made.utilisation == pytest.approx(15 / 20) and made.forecast(ask, 10.0, 0).utilisation == pytest.approx(0.8)
    made.on_sent(ask, 0, 10.0)
    assert made.utilisation == pytest.approx(0.8)
    assert view(promise(free_seats=0)).utilisation == 0.0, "nothing is known of its seats"


def test_objectives_of_zero_do_not_divide_by_zero() -> None:
    found = view(promise()).forecast(RoutingRequest(100, ttft_left_s=0.0, tpot_s=0.0), 10.0, 0)
    assert not found.meets_objectives


def test_an_engine_without_a_promise() -> None:
    made = view()
    assert not made.priced and made.load == (0, 0) and made.accepts_requests
    assert made.forecast(RoutingRequest(100, ttft_left_s=1.0), 10.0, 0) == EngineForecast(7)


def test_attainable_when_idle() -> None:
    made = view(promise(smallest_s=0.01, busy=3.0))
    assert made.attainable_when_idle(RoutingRequest(1000, ttft_left_s=0.12, tpot_s=0.012))
    assert not made.attainable_when_idle(RoutingRequest(1000, ttft_left_s=0.10, tpot_s=0.012))
    assert not made.attainable_when_idle(RoutingRequest(1000, ttft_left_s=0.12, tpot_s=0.011))


def test_a_deadline_for_the_whole_request_implies_ttft_and_tpot() -> None:
    """The prompt gets a tenth of 6 s; 200 expected tokens may be 300."""
    ask = RoutingRequest(100, output_tokens=200, end_left_s=6.0)
    assert ask.has_objectives and ask.required_latency(200) == pytest.approx((0.6, 0.018))
    made = view(promise(smallest_s=0.1, busy=0.2))
    same = made.forecast(RoutingRequest(100, output_tokens=200, ttft_left_s=0.6, tpot_s=0.018), 10.0, 0)
    assert made.forecast(ask, 10.0, 0) == pytest.approx(same)
    assert ask._replace(ttft_left_s=0.2, tpot_s=0.01).required_latency(200) == (0.2, 0.01), "its own come first"
    assert ask._replace(end_left_s=-1.0).required_latency(200)[1] > 0


# --- dead reckoning ---------------------------------------------------------------------------------------------
ASK = RoutingRequest(1000, output_tokens=0, ttft_left_s=0.5, tpot_s=0.05)


def test_sent_requests_count_for_all_processes_until_a_promise_includes_them() -> None:
    made = view(promise(10.0, smallest_s=0.1), share=4)
    before = made.forecast(ASK, 10.01, 0)
    made.on_sent(ASK, 200, 10.01)
    after = made.forecast(ASK, 10.01, 0)
    assert made.load == (4, 0)
    assert after.ttft_s - before.ttft_s == pytest.approx(4 * 800 * 1e-4 / 0.8)
    arriving = 4 * 800 * 1e-4 / 10
    assert after.utilisation - before.utilisation == pytest.approx(4 * (1e-4 + 1e-3) / 0.05 + arriving)
    assert (before.pace_cost, after.pace_cost) == (pytest.approx(0.1), 0.0), "its pace is there now"
    made.update(promise(10.005))
    assert made.forecast(ASK, 10.01, 0) == after, "that promise was made before"
    made.update(promise(10.02))
    assert made.forecast(ASK, 10.02, 0).utilisation == before.utilisation and made.load == (0, 0)


def test_each_sample_has_a_row_and_all_have_one_prompt() -> None:
    """Three more samples cost three rows, seats and outputs, and no TTFT."""
    one = RoutingRequest(800, output_tokens=320, ttft_left_s=0.5, tpot_s=0.05)
    four = one._replace(samples=4)
    weight = (1e-4 + 1e-6 * (800 + 160)) / 0.05
    made = view(promise(10.0))
    alone, found = made.forecast(one, 10.0, 0), made.forecast(four, 10.0, 0)
    assert found.ttft_s == alone.ttft_s and found.utilisation - alone.utilisation == pytest.approx(3 * weight)
    made = view(promise(10.0, free_seats=10))
    assert made.forecast(four, 10.0, 0).utilisation == 0.4
    made = view(promise(10.0, blocks=200, free_blocks=200))
    assert made.forecast(four, 10.0, 0).utilisation == pytest.approx((50 + 4 * 10) / 200)
    made.on_sent(four, 0, 10.0)
    assert made.load == (4, 0) and made.utilisation == pytest.approx((50 + 4 * 10) / 200)
    made = view(promise(10.0))
    made.on_sent(four._replace(ttft_left_s=inf, tpot_s=inf), 0, 10.0)
    assert made.best_effort == 4


def test_unattainable_objectives_fill_no_engine() -> None:
    """The engine rejects such a request at once; it must not divert other requests until then."""
    made = view(promise(10.0, smallest_s=0.1))
    made.on_sent(ASK._replace(tpot_s=1e-9), 0, 10.0)
    assert made.utilisation < 1.2


def test_sent_prompts_count_like_published_ones() -> None:
    """Started prompts count as arriving, by their time over ten seconds, up to .35."""
    silent, heard = view(promise(10.0)), view(promise(10.0))
    ask = RoutingRequest(1000, ttft_left_s=1.0)
    for number in range(20):
        silent.on_sent(ask, 0, 10.001 + number * 1e-4)
    heard.update(promise(10.01, arriving=20 * 0.1 / 10, fill_tokens=20_000, running=20))
    assert silent.utilisation == pytest.approx(heard.utilisation) == pytest.approx(0.2)
    for number in range(200):
        silent.on_sent(ask, 0, 10.01 + number * 1e-4)
    assert silent.forecast(RoutingRequest(1), 10.05, 0).utilisation == pytest.approx(0.35)


def test_requests_in_transit_are_in_no_promise() -> None:
    made = view(promise(10.0), delay_s=0.002)
    made.on_sent(ASK, 0, 10.010)
    made.update(promise(10.011))
    assert made.load == (1, 0)
    made.update(promise(10.013))
    assert made.load == (0, 0)


def test_prompts_that_are_due_later_do_not_count() -> None:
    made = view(promise(10.0))
    before = made.forecast(ASK, 10.0, 0)
    made.on_sent(ASK._replace(ttft_left_s=5.0), 0, 10.0)
    assert made.forecast(ASK, 10.0, 0).ttft_s == pytest.approx(before.ttft_s)
    assert made.forecast(ASK._replace(ttft_left_s=5.0), 10.0, 0).ttft_s > before.ttft_s + 0.1


def test_best_effort_is_counted_separately() -> None:
    made = view(promise(10.0, best_effort=2, waiting=5), share=3)
    made.on_sent(RoutingRequest(10), 0, 10.0)
    made.on_sent(ASK, 0, 10.0)
    assert made.best_effort == 5 and made.load == (11, 0)


def test_a_silent_engine_does_not_fill_the_memory() -> None:
    made, apart = view(promise(10.0)), view(promise(10.0))
    for number in range(3 * MAX_SENT_COUNT):
        made.on_sent(ASK, 0, 10.0 + number)
    assert len(made._sent) == MAX_SENT_COUNT and made.load == (3 * MAX_SENT_COUNT, 0)
    made.update(promise(10.0 + MAX_SENT_COUNT))
    assert made.load[0] >= 2 * MAX_SENT_COUNT - 1, "those since then still count"
    made.update(promise(10.0 + 3 * MAX_SENT_COUNT))
    assert made.load == (0, 0) and made.utilisation == apart.utilisation


def test_a_restarted_engine_has_no_history() -> None:
    made = view(promise(10.0, busy=0.5))
    made.on_sent(RoutingRequest(160, range(10), ttft_left_s=1.0), 0, 10.0)
    assert made.cached_tokens(RoutingRequest(160, range(10))) == 160
    made.reset()
    assert made.promise is None and made.load == (0, 0) and made.utilisation == 0.0
    assert made.cached_tokens(RoutingRequest(160, range(10))) == 0


# --- adapters ---------------------------------------------------------------------------------------------------
ADAPTED = RoutingRequest(100, ttft_left_s=1.0, adapter=5, adapter_bytes=10**8)


def adapter_s(made: EngineView, ask: RoutingRequest = ADAPTED, now_s: float = 10.0) -> float:
    """Return what the adapter adds to the time to first token."""
    plain = made.forecast(ask._replace(adapter=0), now_s, 0)
    return made.forecast(ask, now_s, 0).ttft_s - plain.ttft_s


@pytest.mark.parametrize(
    ("device", "host", "slot_wait_s", "expected_s"),
    [
        ((5,), (), 3.0, 0.0),
        ((9, 5), (5,), 0.0, 0.0),
        ((9,), (5,), 0.0, 0.002),
        ((9,), (7,), 0.0, 0.102),
        ((9,), (5,), 0.5, 0.502),
        ((9,), (), 0.5, 0.502),  # it is read while the slot drains
        ((9,), (), 0.05, 0.102),
    ],
)
def test_seconds_of_an_adapter(
    device: tuple[int, ...], host: tuple[int, ...], slot_wait_s: float, expected_s: float
) -> None:
    made = view(with_adapters(device, host, adapter_slot_wait_s=slot_wait_s))
    assert adapter_s(made) == pytest.approx(expected_s)
    assert made.holds_adapter(ADAPTED) == (5 in device)


def test_a_request_without_an_adapter_waits_for_none() -> None:
    assert adapter_s(view(with_adapters(adapter_slot_wait_s=3.0)), ADAPTED._replace(adapter=0)) == 0.0
    assert adapter_s(view()) == 0.0, "nothing is known"


def test_later_requests_wait_only_for_the_rest_of_a_load() -> None:
    made = view(with_adapters())
    made.on_sent(ADAPTED, 0, 10.0)
    assert made.holds_adapter(ADAPTED)
    assert adapter_s(made, now_s=10.06) == pytest.approx(0.042)
    assert adapter_s(made, ADAPTED._replace(adapter=6), 10.06) == pytest.approx(0.102), "another one"
    made.update(with_adapters(at_s=10.07))
    assert adapter_s(made, now_s=10.08) == pytest.approx(0.022), "it is still being loaded"
    made.update(with_adapters((5,), at_s=10.11))
    assert made.holds_adapter(ADAPTED) and adapter_s(made, now_s=10.12) == 0.0


def test_an_adapter_that_lost_its_slot_has_to_be_loaded_again() -> None:
    made = view(with_adapters())
    made.on_sent(ADAPTED, 0, 10.0)
    made.update(with_adapters((9,), (5,), at_s=11.0))
    assert not made.holds_adapter(ADAPTED)
    assert adapter_s(made, now_s=11.0) == pytest.approx(0.002)
