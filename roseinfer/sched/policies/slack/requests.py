"""Records of requests, and the backlog: those that wait, in order."""

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count
from math import inf
from operator import attrgetter

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast
from roseinfer.sched.policies.common.ledger import Track

# By which deadlines of first tokens are brought forward: the way to the client, and errors of predicted steps.
FIRST_TOKEN_MARGIN_S = 5e-3
MAX_FIRST_TOKEN_MARGIN_SHARE = 0.05  # of the objective

_PLACE = attrgetter("place")


class SlackTrack(Track):
    """Record of a request. `place`: in the order of the backlog, None while it runs. `work_s`: machine time; `price_s`
    is compared with the price limit; `excess`: of its tenant over its share. `weight`: share of the machine that its
    tokens take; while it decodes, as of the last refresh.

    `waits_for`: cause at the last look, None before. `forecast`: what was expected at the first look, None before.
    `uncached`: prompt tokens to compute, as of the first look. `margin_s`: time from `due_s` to the end of the
    objective. `latest_s`: when its whole prompt has to start at the latest.

    `slack_s`: time until its next token is due, as of this step. `idle_s`: time of its last token while it skips steps
    or decodes in spare time; `idle_step`: the last step that it skipped.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.work_s = self.price_s = self.weight = self.excess = 0.0
        self.place: tuple[float, int] | None = None
        self.latest_s = self.slack_s = inf
        self.waits_for: Cause | None = None
        self.forecast: Forecast | None = None
        self.uncached: int | None = None
        self.is_demoted = False
        self.idle_s, self.idle_step = 0.0, -2
        self.promise_first_token(self.ttft_s)

    def promise_first_token(self, ttft_s: float) -> None:
        """Set its TTFT objective (inf: none) and, with a margin, the deadline of its first token."""
        self.margin_s = min(FIRST_TOKEN_MARGIN_S, MAX_FIRST_TOKEN_MARGIN_SHARE * ttft_s)
        self.ttft_s, self.due_s = ttft_s, self.request.arrival_s + ttft_s - self.margin_s

    @property
    def can_wait(self) -> bool:
        """True if it may start at any time, because only its pace is promised."""
        return self.is_promised and self.due_s == inf and self.end_s == inf

    def count_uncached(self, uncached: Callable[[Request], int]) -> int:
        """Return the prompt tokens left to compute, as of the first call."""
        if self.uncached is None:
            self.uncached = uncached(self.request)
        return self.uncached


class Backlog:
    """Waiting requests in three sorted lists: `affordable`, `parked` (too expensive), `rest` (no objectives).

    They are sorted by key; of equal keys, the request that began to wait first comes first.
    """

    def __init__(self) -> None:
        self.affordable: list[SlackTrack] = []
        self.parked: list[SlackTrack] = []
        self.rest: list[SlackTrack] = []
        self._added = count()

    def add(self, track: SlackTrack, key: float, affordable: bool) -> None:
        """Add a request. `affordable`: it is worth its cost at present, or has no objectives."""
        track.place = key, next(self._added)
        tracks = self.rest if not track.is_promised else self.affordable if affordable else self.parked
        insort(tracks, track, key=_PLACE)

    def remove(self, track: SlackTrack) -> None:
        """Remove a request that waits no longer, if it did."""
        if track.place is None:
            return
        for tracks in (self.affordable, self.parked, self.rest):
            index = bisect_left(tracks, track.place, key=_PLACE)
            if tracks[index : index + 1] == [track]:
                del tracks[index]
        track.place = None

    def sort_by_price(self, is_affordable: Callable[[SlackTrack], bool]) -> None:
        waiting = sorted(self.affordable + self.parked, key=_PLACE)
        self.affordable, self.parked = [], []
        for track in waiting:
            (self.affordable if is_affordable(track) else self.parked).append(track)
