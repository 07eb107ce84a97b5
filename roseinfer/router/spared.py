"""Engine of a full fleet that gets no more tight requests, so that the loose ones get an engine for themselves.

All requests of an engine pay for the pace of its tightest TPOT objective. While an engine has no tight requests, these
avoid it. Once all engines have some, none is dearer than another for the next one, and it stays so for as long as the
load lasts, though all would get more done with an engine for loose requests. `docs/explanation/routing.md` has figures.
"""

from collections.abc import Sequence

from roseinfer.router.base import RoutingRequest
from roseinfer.router.view import EngineView

# With two engines it costs more than it gains (`docs/explanation/routing.md`).
MIN_ENGINES_COUNT = 3
MAX_EQUAL_RATIO = 1.05  # up to which paces count as equal
LOOSE_GAIN_SHARE = 1 / 64  # of a request, for the share of loose ones


class SparedEngine:
    """Choice of the engine: the last one without tight requests, else the one with the lowest utilisation.

    It is spared only while the fleet is full, all engines keep the same pace, and the share of loose requests is large
    enough for one engine.
    """

    def __init__(self) -> None:
        self._loose_share = 0.0
        self._engine: int | None = None

    def from_request(self, request: RoutingRequest, candidates: Sequence[EngineView], full: bool) -> int | None:
        """Return the engine that the request must not go to, None if it may go to any. Call it for each request that
        has objectives. candidates: at least one.
        """
        paces_s = [candidate.pace_s for candidate in candidates]
        equal_s = MAX_EQUAL_RATIO * min(paces_s)
        loose = request.required_latency(request.output_tokens)[1] > equal_s
        self._loose_share += LOOSE_GAIN_SHARE * (loose - self._loose_share)
        if max(paces_s) > equal_s:
            self._engine = max(candidates, key=lambda candidate: candidate.pace_s).engine
            return None
        count = len(candidates)
        if loose or not full or count < MIN_ENGINES_COUNT or self._loose_share * count < 1:
            return None
        if self._engine not in [candidate.engine for candidate in candidates]:
            self._engine = min(candidates, key=lambda candidate: candidate.utilisation).engine
        return self._engine
