"""Time of a step on its device: what counts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from roseinfer.runner.timing import HostTimer
from tests.runner.tiny import Bench


class LoggedTimer(HostTimer):
    def __init__(self, log: Callable[[str], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.staged = lambda: log("staged")  # type: ignore[method-assign, assignment]


def test_the_host_s_work_counts_only_beside_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a step would take less if the host hid its work."""
    log: list[str] = []

    def noted(phase: str) -> AbstractContextManager[None]:
        log.append(phase)
        return nullcontext()

    monkeypatch.setattr("roseinfer.runner.timing.HostTimer", lambda: LoggedTimer(noted))
    bench = Bench()
    bench.runner.observe(noted)
    plans = [bench.plan([bench.admit(0, [1, 2, 3])], [bench.row(0, 0, 3)]), bench.plan([], [bench.row(0, 3, 1)])]
    handles = []
    for plan in plans:
        handles.append(bench.runner.submit(plan))
        bench.runner.sample(handles[-1])
    alone = ["prepare", "forward", "prepare", "staged"]
    assert log == [*alone, "staged", *alone]
    for handle in handles:
        bench.runner.collect(handle)
    log.clear()
    bench.run([], [bench.row(0, 4, 1)])
    assert log == alone
