"""Audits of an idle engine's scheduler."""

import logging

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.engine.core import EngineCore
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import OWNER, Heartbeat, Shutdown
from roseinfer.kv.manager import AUDIT_PIECE_BLOCKS
from roseinfer.sched.idle_audit import IDLE_S, IdleAudit
from tests.engine.test_loop import Script, add
from tests.helpers.engines import add as add_to
from tests.helpers.engines import make_core, run_dry

BLOCKS = 4 * AUDIT_PIECE_BLOCKS


@pytest.fixture
def core() -> EngineCore:
    return make_core(num_blocks=BLOCKS, block_size=4, max_num_batched_tokens=256)


def audited(core: EngineCore, clock: ManualClock) -> tuple[IdleAudit, list[int]]:
    """Return an audit of the core's scheduler, and the number of pieces of each pass."""
    pieces: list[int] = []
    audit = core.scheduler.audit

    def counted():
        pieces.append(0)
        for piece in audit():
            pieces[-1] += 1
            yield piece

    core.scheduler.audit = counted
    return IdleAudit(core.scheduler, clock), pieces


def finish(core: EngineCore) -> None:
    while core.busy:
        core.step()


def test_the_state_is_audited_once_after_work_and_a_pause_in_pieces(core: EngineCore) -> None:
    clock = ManualClock()
    checks, pieces = audited(core, clock)
    checks.idle()
    assert not pieces, "nothing has happened yet"
    add_to(core, "a", [1] * 100)
    finish(core)
    checks.busy()
    clock.advance(IDLE_S / 2)
    checks.idle()
    assert not pieces, "the next request may come at any time"
    clock.advance(IDLE_S)
    checks.idle()
    assert pieces == [1] and checks.under_way
    turns = 1
    while checks.under_way:
        checks.idle()
        turns += 1
    assert turns >= 2 * BLOCKS // AUDIT_PIECE_BLOCKS, "the free list, then the index"
    clock.advance(IDLE_S)
    checks.idle()
    assert len(pieces) == 1 and not checks.under_way
    assert core.stats().integrity_errors == 0


def test_work_ends_an_audit(core: EngineCore) -> None:
    clock = ManualClock()
    checks, pieces = audited(core, clock)
    checks.busy()
    clock.advance(IDLE_S)
    checks.idle()
    add_to(core, "a", [1] * 100)
    finish(core)
    checks.busy()
    checks.idle()
    assert not checks.under_way and core.stats().integrity_errors == 0
    clock.advance(IDLE_S)
    checks.idle()
    assert len(pieces) == 2, "begun anew"


@pytest.mark.parametrize("broken", ["a lost block", "a lost seat", "a wrong key"])
def test_inconsistencies_are_logged_and_counted(
    core: EngineCore, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    checks = IdleAudit(core.scheduler, clock)
    add_to(core, "a", [1] * 100)
    run_dry(core)
    checks.busy()
    if broken == "a lost block":
        core.scheduler.kv.pool.take(1)
    elif broken == "a lost seat":
        core.scheduler.roster.free_seats.pop()
    else:
        core.scheduler.kv.index._blocks.popitem()
    clock.advance(IDLE_S)
    with caplog.at_level(logging.ERROR):
        checks.idle()
        while checks.under_way:
            checks.idle()
    assert core.stats().integrity_errors == 1
    assert "inconsistent scheduler state" in caplog.text


class Patient(Script):
    """Script that leaves the engine idle for a while. `waited`: how long the loop was ready to wait."""

    idle_turns = 60

    def receive(self, timeout_s: float):
        if self.core.busy or self._batches:
            return super().receive(timeout_s)
        self.idle_turns -= 1
        self.waited = [*getattr(self, "waited", []), timeout_s]
        self._clock.advance(timeout_s)
        return [] if self.idle_turns else [(OWNER, Shutdown())]


def test_the_loop_audits_when_idle_and_sleeps_again() -> None:
    clock = ManualClock()
    core = make_core(num_blocks=BLOCKS, block_size=4)
    checks, pieces = audited(core, clock)
    script = Patient(core, clock, [(OWNER, add("a", 3))])
    EngineLoop(core, script, script, clock, None, checks).run()
    assert len(pieces) == 1 and pieces[0] >= 2 * BLOCKS // AUDIT_PIECE_BLOCKS
    assert script.waited.count(0.0) == pieces[0], "it does not sleep between two pieces"
    assert script.waited[-1] > 0
    assert any(isinstance(message, Heartbeat) for _, _, message in script.sent)
