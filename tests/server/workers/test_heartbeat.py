"""Who moves, who is quiet, who hangs."""

import asyncio
from pathlib import Path

import pytest

from roseinfer.server.workers.counters import Count, SharedCounters, counters_file
from roseinfer.server.workers.heartbeat import INTERVAL_S, QUIET_S, START_S, Heartbeats, Pulse, Silence

TIMEOUT_S = 3.0


@pytest.fixture
def counters(tmp_path: Path) -> SharedCounters:
    return SharedCounters(counters_file(str(tmp_path / "counters"), 2), 2)


def silence(heartbeats: Heartbeats, seconds: float, number: int = 1, serving: bool = True) -> Silence:
    """What is known after so many seconds more of looking."""
    for _ in range(round(seconds / INTERVAL_S)):
        seen = heartbeats.look(0, number, serving)
    return seen


def test_a_worker_is_quiet_at_first_and_hung_in_the_end(counters: SharedCounters) -> None:
    heartbeats = Heartbeats(counters, TIMEOUT_S)
    counters.add(0, Count.BEATS, 1)
    assert silence(heartbeats, QUIET_S) == Silence(QUIET_S - INTERVAL_S, quiet=False, hung=False)
    assert silence(heartbeats, INTERVAL_S) == Silence(QUIET_S, quiet=True, hung=False)
    counters.add(0, Count.BEATS, 1)
    assert silence(heartbeats, INTERVAL_S) == Silence(0.0, quiet=False, hung=False)
    assert not silence(heartbeats, TIMEOUT_S - INTERVAL_S).hung
    assert silence(heartbeats, INTERVAL_S) == Silence(TIMEOUT_S, quiet=True, hung=True)


def test_a_worker_that_starts_has_longer(counters: SharedCounters) -> None:
    heartbeats = Heartbeats(counters, TIMEOUT_S)
    assert not silence(heartbeats, START_S - INTERVAL_S, serving=False).quiet
    assert silence(heartbeats, INTERVAL_S, serving=False).hung


def test_the_silence_of_a_worker_is_not_its_successors(counters: SharedCounters) -> None:
    heartbeats = Heartbeats(counters, TIMEOUT_S)
    counters.add(0, Count.BEATS, 5)
    assert silence(heartbeats, TIMEOUT_S + INTERVAL_S).hung
    counters.clear(0)
    assert silence(heartbeats, INTERVAL_S, number=2) == Silence(INTERVAL_S, quiet=False, hung=False)


def test_an_event_loop_that_turns_beats(counters: SharedCounters) -> None:
    async def main() -> None:
        pulse = Pulse(counters, 1)
        async with asyncio.timeout(30):
            while counters.get(1, Count.BEATS) < 3:
                await asyncio.sleep(0.01)
        pulse.stop()
        before = counters.get(1, Count.BEATS)
        await asyncio.sleep(2 * INTERVAL_S)
        assert counters.get(1, Count.BEATS) == before

    asyncio.run(main())
    assert counters.get(0, Count.BEATS) == 0
