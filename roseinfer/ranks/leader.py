"""Rank 0's runner: what it is told to do, it has all other ranks do too."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import PassThrough, Runner
from roseinfer.parallel.group import LiveGroup
from roseinfer.ranks.calls import COLLECT, SAMPLE, CallWriter, Sampled
from roseinfer.ranks.others import OtherRanks

log = logging.getLogger("roseinfer.ranks")

# For an engine to end by itself when a rank is lost: its runner may wait for that rank in a way that has no end.
END_PATIENCE_S = 3.0
Result = TypeVar("Result")


class LeadingRunner(PassThrough):
    """Hands each call to the others, then makes it itself; nobody answers. Whoever needs another's part of a result
    waits for it there, in the group's own calls.

    `inner`: this process's runner, which may do what it is told in a thread of its own, in the same order. A call
    raises the error that another rank has ended with, if there is one. Whoever drops it without closing it ends the
    other ranks all the same.
    """

    def __init__(self, inner: Runner, group: LiveGroup, others: OtherRanks) -> None:
        super().__init__(inner)
        self._group = group
        self._others = others
        self._calls = CallWriter()
        self._sampled = Sampled()
        # Also when the interpreter ends: what the group waits for would keep it, if a rank hangs.
        self._end = weakref.finalize(self, _end, inner, others, group, os.getpid())

    def submit(self, plan: StepPlan) -> Any:
        self._others.tell(self._calls.submit(plan, self._sampled))
        return self._with_others(self.inner.submit, plan)

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        self._others.tell(SAMPLE if masks is None else self._calls.masked(masks))
        self._with_others(self.inner.sample, handle, masks)

    def collect(self, handle: Any) -> StepResult:
        self._others.tell(COLLECT)
        result = self._with_others(self.inner.collect, handle)
        self._with_others(self._group.check)
        self._others.check()
        self._sampled.add(result.rows)
        return result

    def _with_others(self, call: Callable[..., Result], *args: Any) -> Result:
        try:
            return call(*args)
        except Exception as error:
            reason = self._others.failure_behind(error)
            if reason is error:
                raise
            raise reason from error

    def close(self) -> None:
        """Steps that are under way are finished if that is soon. May be called again."""
        self._end()


def _end(inner: Runner, others: OtherRanks, group: LiveGroup, owner: int) -> None:
    """A fork of the process `owner` has none of them, and drops what it will."""
    if os.getpid() != owner:
        return
    # First: what this process's part waits for may be in a rank that hangs, until that is ended.
    others.end()
    try:
        inner.close()
    finally:
        others.close()
        group.close()


def end_on_loss(others: OtherRanks, group: LiveGroup, *, starts: bool = False) -> None:
    """If a rank is lost, whoever waits for it shall hear of it. A process that is the engine's alone ends if it has not
    done so soon by itself; one that `starts`, and may load for minutes before it would notice, says why.
    """

    def on_loss() -> None:
        group.abort()
        if others.home is not None:
            timer = threading.Timer(END_PATIENCE_S, end)
            timer.daemon = True
            timer.start()

    def end() -> None:
        log.error("the engine ends: it has lost a rank")
        if starts and others.home is not None and others.failure is not None:
            others.home.tell(others.failure)
        os._exit(1)

    others.on_loss = on_loss
