"""What an engine's keeper says to those who follow it."""

import msgspec

from roseinfer.cluster.status import EngineStatus
from roseinfer.engine.api import EngineReport, StepRecord


class StatusUpdate(msgspec.Struct, tag="status_update", array_like=True, gc=False):
    """How the engine does: when its status changes, and twice a second. `steps`: since the last time; when each ended
    is told on the clock that said `now_s` when this was sent.
    """

    status: EngineStatus
    report: EngineReport
    steps: list[StepRecord] = []
    now_s: float = 0.0


KeeperMessage = StatusUpdate
