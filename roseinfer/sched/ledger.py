"""What a policy with objectives remembers of each request, by the stage it is in."""

from math import inf

from roseinfer.core.events import Admitted, Ended, Event, Queued
from roseinfer.core.request import Request

# Beyond these an objective is as good as at them, and what policies compute from it would be 0, inf or NaN.
SHORTEST_S, LONGEST_S = 1e-6, 1e9


class Track:
    """One request. `ttft_s`, `tpot_s`: its objectives, inf where it has none. `due_s`: when its first token is due.

    `anchor_s + pace_s * known tokens` is when the next token is due, once the first is there: `first token +
    pace * outputs`. The other fields belong to the policy.
    """

    __slots__ = (
        "anchor_s",
        "credit",
        "doomed",
        "due_s",
        "entry",
        "first_s",
        "idle_s",
        "idle_step",
        "key",
        "length",
        "pace_s",
        "request",
        "tokens",
        "tpot_s",
        "ttft_s",
        "weight",
        "work_s",
    )

    def __init__(self, request: Request) -> None:
        slo = request.slo
        self.request = request
        self.tokens = request.tokens
        self.ttft_s = _sane(slo.ttft_s if slo else None)
        self.tpot_s = _sane(slo.tpot_s if slo else None)
        self.due_s = request.arrival_s + self.ttft_s
        self.anchor_s = inf
        self.first_s = 0.0
        self.pace_s = 0.0
        self.credit = 0.0
        self.doomed = False
        self.idle_s = 0.0
        self.idle_step = -2
        self.entry = -1
        self.key = self.length = self.weight = self.work_s = 0.0

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.request.prompt_len

    def bound_whole(self) -> None:
        """Split an objective for the whole request into one for the first token and one for those behind it."""
        slo = self.request.slo
        if slo is None or slo.e2e_s is None:
            return
        e2e_s = _sane(slo.e2e_s)
        self.ttft_s = _sane(min(self.ttft_s, e2e_s / 4))
        self.due_s = self.request.arrival_s + self.ttft_s
        self.tpot_s = _sane(min(self.tpot_s, (e2e_s - self.ttft_s) / max(1.0, self.length)))

    def set_pace(self, margin: float, first_token_s: float) -> None:
        """Bring its token deadlines forward by a share `margin` of the objective."""
        self.first_s = first_token_s
        self.pace_s = self.tpot_s * (1 - margin)
        self.anchor_s = first_token_s - self.request.prompt_len * self.pace_s


class Ledger:
    """Every live request in one of three stages. `filling`: it runs, and its prompt is not all planned yet."""

    def __init__(self) -> None:
        self.waiting: dict[str, Track] = {}
        self.filling: dict[str, Track] = {}
        self.decoding: dict[str, Track] = {}

    def observe(self, event: Event) -> Track | None:
        """The track that the event is about, if it is about one."""
        if isinstance(event, Queued):
            return self._queue(event.request)
        if isinstance(event, Admitted):
            track = self.waiting.pop(event.request_id)
            self.filling[event.request_id] = track
            return track
        if isinstance(event, Ended):
            return self._remove(event.request_id)
        return None

    def promote(self) -> list[Track]:
        """Those whose prompt is planned to its end since the last call: they decode from now on."""
        if not self.filling:
            return []
        done = [track for track in self.filling.values() if is_filled(track.request)]
        for track in done:
            del self.filling[track.request.request_id]
            self.decoding[track.request.request_id] = track
        return done

    def _queue(self, request: Request) -> Track:
        track = self._remove(request.request_id) or Track(request)
        self.waiting[request.request_id] = track
        return track

    def _remove(self, request_id: str) -> Track | None:
        for stage in (self.decoding, self.filling, self.waiting):
            track = stage.pop(request_id, None)
            if track is not None:
                return track
        return None


def _sane(objective_s: float | None) -> float:
    return inf if objective_s is None else max(SHORTEST_S, min(objective_s, LONGEST_S))


def is_filled(request: Request) -> bool:
    return request.planned >= request.prompt_len and request.remaining <= 1
