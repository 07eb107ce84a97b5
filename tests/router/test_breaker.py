"""Circuit breaker of an engine."""

from roseinfer.router.breaker import (
    MAX_FAULTS_COUNT,
    MAX_OPEN_S,
    MIN_FAULT_INTERVAL_S,
    MIN_OPEN_S,
    AttemptOutcome,
    Breaker,
)


def opened(at_s: float = 10.0) -> Breaker:
    """Return an open breaker whose last fault was at `at_s`."""
    breaker = Breaker()
    for number in range(MAX_FAULTS_COUNT):
        breaker.report(AttemptOutcome.FAULT, at_s - MIN_FAULT_INTERVAL_S * (MAX_FAULTS_COUNT - 1 - number) * 1.5)
    return breaker


def test_it_opens_after_faults_in_a_row() -> None:
    breaker = Breaker()
    for number in range(MAX_FAULTS_COUNT):
        assert breaker.admits(float(number)) and breaker.closed
        breaker.report(AttemptOutcome.FAULT, float(number))
    assert not breaker.closed and not breaker.admits(MAX_FAULTS_COUNT - 0.9)


def test_an_answer_between_faults_keeps_it_closed() -> None:
    breaker = Breaker()
    for number in range(4 * MAX_FAULTS_COUNT):
        breaker.report(AttemptOutcome.FAULT, float(number))
        if number % MAX_FAULTS_COUNT == MAX_FAULTS_COUNT - 2:
            breaker.report(AttemptOutcome.ANSWERED, float(number))
    assert breaker.admits(100.0)


def test_a_full_engine_is_neither_healthy_nor_faulty() -> None:
    """429 and 503 of a full engine neither open the breaker nor close an open one."""
    full = Breaker()
    for number in range(1000):
        full.report(AttemptOutcome.NEUTRAL, float(number))
    assert full.closed
    failing = Breaker()
    for number in range(MAX_FAULTS_COUNT):
        failing.report(AttemptOutcome.FAULT, float(number))
        failing.report(AttemptOutcome.NEUTRAL, number + 0.5)
    assert not failing.closed


def test_all_requests_of_a_step_that_fails_are_one_fault() -> None:
    breaker = Breaker()
    for number in range(64):
        breaker.report(AttemptOutcome.FAULT, 10.0 + number * 1e-4)
    assert breaker.closed


def test_one_trial_request_is_admitted_after_the_open_time() -> None:
    breaker = opened()
    assert not breaker.admits(10.0 + 0.9 * MIN_OPEN_S)
    now_s = 10.0 + MIN_OPEN_S
    assert breaker.admits(now_s)
    breaker.on_sent(now_s)
    assert not breaker.admits(now_s) and not breaker.admits(now_s + 0.9 * MIN_OPEN_S)
    breaker.report(AttemptOutcome.ANSWERED, now_s + 0.1)
    assert breaker.closed and breaker.admits(now_s + 0.1)


def test_a_trial_that_fails_doubles_the_time() -> None:
    breaker, now_s, waits = opened(), 10.0, []
    for _ in range(8):
        opens_s = next(now_s + 0.5 * step for step in range(1, 200) if breaker.admits(now_s + 0.5 * step))
        waits.append(opens_s - now_s)
        now_s = opens_s
        breaker.on_sent(now_s)
        breaker.report(AttemptOutcome.FAULT, now_s)
    assert waits == [MIN_OPEN_S, 2.0, 4.0, 8.0, 16.0, MAX_OPEN_S, MAX_OPEN_S, MAX_OPEN_S]
    breaker.report(AttemptOutcome.ANSWERED, now_s)
    for number in range(MAX_FAULTS_COUNT):
        breaker.report(AttemptOutcome.FAULT, now_s + 1 + number)
    assert breaker.admits(now_s + MAX_FAULTS_COUNT + MIN_OPEN_S), "from the beginning again"


def test_a_trial_without_an_outcome_expires() -> None:
    breaker = opened()
    now_s = 10.0 + MIN_OPEN_S
    breaker.on_sent(now_s)
    breaker.report(AttemptOutcome.NEUTRAL, now_s + 0.1)
    assert not breaker.closed and breaker.admits(now_s + 0.1)
    breaker.on_sent(now_s + 0.1)
    assert not breaker.admits(now_s + 0.2) and breaker.admits(now_s + 0.1 + MIN_OPEN_S)
