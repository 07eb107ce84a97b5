"""An engine that does nothing is told from one that has much to do."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from roseinfer.engine.silence import INTERVAL_S, STOPPED_S, WORKING_PATIENCE, Listening, Vitals, vitals

QUIET_S, HUNG_S = 5.0, 20.0
IDLE, STOPPED = Vitals(1.0, False), Vitals(1.0, True)


def until(
    condition: str, *, step_s: float = 0.0, seen: Callable[[float], Vitals | None], on_cpu: bool = False
) -> float:
    """After how many seconds without a sign it is so; -1: not within an hour."""
    listening = Listening(QUIET_S, HUNG_S, on_cpu=on_cpu)
    listening.look(1, 0.0, seen(0.0))
    for look in range(1, round(3600 / INTERVAL_S)):
        if getattr(listening.look(1, step_s, seen(look * INTERVAL_S)), condition):
            return look * INTERVAL_S
    return -1.0


def idle(_: float) -> Vitals:
    return IDLE


def busy(seconds: float) -> Vitals:
    return Vitals(1.0 + 0.5 * seconds, False)


def test_each_sign_begins_anew() -> None:
    listening = Listening(QUIET_S, HUNG_S, on_cpu=False)
    for sign in range(100):
        silences = [listening.look(sign, 0.0, IDLE) for _ in range(round(QUIET_S / INTERVAL_S))]
        assert silences[0].seconds == 0 and not any(silence.quiet for silence in silences)


def test_silence_is_first_quiet_and_then_for_good() -> None:
    assert until("quiet", seen=idle) == QUIET_S and until("hung", seen=idle) == HUNG_S


def test_a_step_may_take_what_the_engine_has_said() -> None:
    assert until("quiet", step_s=30.0, seen=idle) == QUIET_S + 30
    assert until("hung", step_s=30.0, seen=idle) == HUNG_S + 30
    assert until("hung", step_s=1e9, seen=idle) == (1 + WORKING_PATIENCE) * HUNG_S, "but not for ever"


def test_between_two_heartbeats_nobody_is_quiet() -> None:
    listening = Listening(0.1, 0.2, on_cpu=False)
    silences = [listening.look(1, 0.0, IDLE) for _ in range(round(1 / INTERVAL_S) + 1)]
    assert [silence.quiet for silence in silences] == [silence.hung for silence in silences]
    assert [silence.quiet for silence in silences].index(True) == round(1 / INTERVAL_S)


def test_a_stopped_process_is_quiet_at_once_whatever_it_has_said() -> None:
    assert until("quiet", step_s=30.0, seen=lambda _: STOPPED) == STOPPED_S
    assert until("hung", step_s=30.0, seen=lambda _: STOPPED) == HUNG_S


def test_one_that_computes_on_the_cpu_is_given_more_time() -> None:
    assert until("quiet", seen=busy, on_cpu=True) == WORKING_PATIENCE * QUIET_S
    assert until("hung", seen=busy, on_cpu=True) == WORKING_PATIENCE * HUNG_S
    assert until("quiet", seen=busy) == QUIET_S, "before a GPU that has failed, the processor is busy too"
    assert until("quiet", seen=idle, on_cpu=True) == QUIET_S
    assert until("quiet", seen=lambda s: Vitals(1.0 + 0.1 * s, False), on_cpu=True) == QUIET_S


def test_what_the_system_does_not_tell_counts_for_the_engine() -> None:
    assert until("quiet", seen=lambda _: None, on_cpu=True) == WORKING_PATIENCE * QUIET_S
    assert until("quiet", seen=lambda _: None) == QUIET_S


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_process_is_seen_to_work_and_to_be_stopped() -> None:
    before = vitals(os.getpid())
    while (now := vitals(os.getpid())) == before:
        pass
    assert before is not None and now is not None and now.cpu_s > before.cpu_s and not now.stopped
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        seen = vitals(sleeper.pid)
        assert seen is not None and seen.stopped
    finally:
        sleeper.kill()
        sleeper.wait()
    assert vitals(sleeper.pid) is None
