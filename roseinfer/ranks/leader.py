"""Runner of rank 0, which has all other ranks make the same calls."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import PassThrough, Runner
from roseinfer.parallel.group import LiveGroup
from roseinfer.ranks.calls import COLLECT, SAMPLE, CallWriter, SampledDigest
from roseinfer.ranks.other_ranks import OtherRanks

log = logging.getLogger("roseinfer.ranks")

# An engine that has lost a rank has this long to end by itself; its runner may wait for that rank without end.
EXIT_TIMEOUT_S = 3.0
Result = TypeVar("Result")


class LeadingRunner(PassThrough):
    """Runner that sends each call to the other ranks and then makes it itself. The other ranks send no results.

    A call that needs another rank's part of a result waits for it in the group. A call raises the error with which
    another rank has ended. `inner`: this process's runner; it may work in a thread of its own, in the same order.
    A runner that is dropped without `close` also ends the other ranks.
    """

    def __init__(self, inner: Runner, group: LiveGroup, others: OtherRanks) -> None:
        super().__init__(inner)
        self._group = group
        self._others = others
        self._calls = CallWriter()
        self._sampled = SampledDigest()
        # Also runs at interpreter exit: destructors of the group would wait for a rank that hangs.
        self._end = weakref.finalize(self, end_ranks, inner, others, group, os.getpid())

    def submit(self, plan: StepPlan) -> Any:
        self._others.send(self._calls.submit(plan, self._sampled))
        return self._with_others(self.inner.submit, plan)

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> None:
        self._others.send(SAMPLE if masks is None else self._calls.masked(masks))
        self._with_others(self.inner.sample, handle, masks)

    def collect(self, handle: Any) -> StepResult:
        self._others.send(COLLECT)
        result = self._with_others(self.inner.collect, handle)
        self._with_others(self._group.check)
        self._others.check()
        self._sampled.add(result.rows)
        return result

    def _with_others(self, call: Callable[..., Result], *args: Any) -> Result:
        try:
            return call(*args)
        except Exception as error:
            cause = self._others.cause_of(error)
            if cause is error:
                raise
            raise cause from error

    def close(self) -> None:
        """End all ranks. Steps in flight are finished if that is soon. May be called again."""
        self._end()


def end_ranks(inner: Runner, others: OtherRanks, group: LiveGroup, owner: int) -> None:
    """Close a leading runner's parts. In a fork of the process `owner` do nothing: they are not the fork's."""
    if os.getpid() != owner:
        return
    # First, as the inner runner may wait for a rank that hangs, until that is ended.
    others.end()
    try:
        inner.close()
    finally:
        others.close()
        group.close()


def exit_on_loss(others: OtherRanks, group: LiveGroup, *, starting: bool = False) -> None:
    """Abort the group's waits when a rank is lost, and exit an engine's own process if it does not end soon by itself.

    starting: the process may be loading for minutes; report why it exits to its owner.
    """

    def on_loss() -> None:
        group.abort()
        if others.host is not None:
            timer = threading.Timer(EXIT_TIMEOUT_S, end)
            timer.daemon = True
            timer.start()

    def end() -> None:
        log.error("the engine exits: it has lost a rank")
        if starting and others.host is not None and others.failure is not None:
            others.host.report_error(others.failure)
        os._exit(1)

    others.on_loss = on_loss
