"""What an engine's keeper says to those who follow it."""

import msgspec

from roseinfer.engine.api import EngineReport, StepRecord
from roseinfer.engine.standing import Standing


class Tidings(msgspec.Struct, tag="tidings", array_like=True, gc=False):
    """How the engine does: when its standing changes, and twice a second. `steps`: since the last time; when each ended
    is told on the clock that said `now_s` when this was sent.
    """

    standing: Standing
    report: EngineReport
    steps: list[StepRecord] = []
    now_s: float = 0.0


KeeperMessage = Tidings
