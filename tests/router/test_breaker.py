"""When an engine that fails gets no requests."""

from roseinfer.router.breaker import APART_S, FAULTS, LONGEST_S, OPEN_S, Breaker, Outcome


def opened(at_s: float = 10.0) -> Breaker:
    """Its last fault was at `at_s`."""
    breaker = Breaker()
    for number in range(FAULTS):
        breaker.report(Outcome.FAULT, at_s - APART_S * (FAULTS - 1 - number) * 1.5)
    return breaker


def test_it_opens_after_faults_in_a_row() -> None:
    breaker = Breaker()
    for number in range(FAULTS):
        assert breaker.admits(float(number)) and breaker.closed
        breaker.report(Outcome.FAULT, float(number))
    assert not breaker.closed and not breaker.admits(FAULTS - 0.9)


def test_an_answer_between_faults_keeps_it_closed() -> None:
    breaker = Breaker()
    for number in range(4 * FAULTS):
        breaker.report(Outcome.FAULT, float(number))
        if number % FAULTS == FAULTS - 2:
            breaker.report(Outcome.ANSWERED, float(number))
    assert breaker.admits(100.0)


def test_no_room_is_neither_good_nor_bad() -> None:
    """A full engine answers 429 and 503 all the time, and stays; a failing one is not closed by them."""
    full = Breaker()
    for number in range(1000):
        full.report(Outcome.NEUTRAL, float(number))
    assert full.closed
    failing = Breaker()
    for number in range(FAULTS):
        failing.report(Outcome.FAULT, float(number))
        failing.report(Outcome.NEUTRAL, number + 0.5)
    assert not failing.closed


def test_all_requests_of_a_step_that_fails_are_one_fault() -> None:
    breaker = Breaker()
    for number in range(64):
        breaker.report(Outcome.FAULT, 10.0 + number * 1e-4)
    assert breaker.closed


def test_one_request_is_let_through_when_it_was_open_for_a_while() -> None:
    breaker = opened()
    assert not breaker.admits(10.0 + 0.9 * OPEN_S)
    now_s = 10.0 + OPEN_S
    assert breaker.admits(now_s)
    breaker.sent(now_s)
    assert not breaker.admits(now_s) and not breaker.admits(now_s + 0.9 * OPEN_S)
    breaker.report(Outcome.ANSWERED, now_s + 0.1)
    assert breaker.closed and breaker.admits(now_s + 0.1)


def test_a_trial_that_fails_doubles_the_time() -> None:
    breaker, now_s, waits = opened(), 10.0, []
    for _ in range(8):
        opens_s = next(now_s + 0.5 * step for step in range(1, 200) if breaker.admits(now_s + 0.5 * step))
        waits.append(opens_s - now_s)
        now_s = opens_s
        breaker.sent(now_s)
        breaker.report(Outcome.FAULT, now_s)
    assert waits == [OPEN_S, 2.0, 4.0, 8.0, 16.0, LONGEST_S, LONGEST_S, LONGEST_S]
    breaker.report(Outcome.ANSWERED, now_s)
    for number in range(FAULTS):
        breaker.report(Outcome.FAULT, now_s + 1 + number)
    assert breaker.admits(now_s + FAULTS + OPEN_S), "from the beginning again"


def test_a_trial_without_room_or_news_gives_way_to_another() -> None:
    breaker = opened()
    now_s = 10.0 + OPEN_S
    breaker.sent(now_s)
    breaker.report(Outcome.NEUTRAL, now_s + 0.1)
    assert not breaker.closed and breaker.admits(now_s + 0.1)
    breaker.sent(now_s + 0.1)
    assert not breaker.admits(now_s + 0.2) and breaker.admits(now_s + 0.1 + OPEN_S)
