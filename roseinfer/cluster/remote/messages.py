"""Messages from an engine's server to clients that follow its status."""

import msgspec

from roseinfer.cluster.status import EngineStatus
from roseinfer.engine.api import EngineReport, StepRecord


class StatusUpdate(msgspec.Struct, tag="status_update", array_like=True, gc=False):
    """The engine's status and report: sent when the status changes, and twice a second.

    `steps`: those since the last update. Their end times are on the clock that showed `now_s` when this was sent.
    """

    status: EngineStatus
    report: EngineReport
    steps: list[StepRecord] = []
    now_s: float = 0.0


StatusMessage = StatusUpdate
