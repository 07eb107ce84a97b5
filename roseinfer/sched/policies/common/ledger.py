"""Ledger of a policy with objectives: its record of each request by stage, and the deadlines of tokens."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Generic, TypeVar

from roseinfer.core.request import Request
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads
from roseinfer.core.slo import Slo
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policy import Admitted, Ended, Event, Queued

# Bounds on objectives: beyond them, results of policies would be 0, inf or NaN.
MIN_OBJECTIVE_S, MAX_OBJECTIVE_S = 1e-6, 1e9
_NO_OBJECTIVES = Slo()


class Track:
    """Policy's record of one request; policies derive from it for fields of their own. `slo`: objectives as the client
    set them; `ttft_s`, `tpot_s`: as the policy pursues them, inf without one. `length`: expected output tokens.

    `due_s`: deadline of the first token. Then `anchor_s + pace_s * known tokens` is the deadline of the next token.
    `tokens_per_step`: expected tokens of each step of it; more than 1 only with drafts. `least_tokens`: how many of
    them its TPOT objective needs.

    `end_s`: deadline of the last token, inf without an objective for the whole request. `is_promised`: it has an
    objective that can still be met or missed.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.tokens
        self.slo = request.slo or _NO_OBJECTIVES
        self.is_promised = request.slo is not None
        self.ttft_s = sane(self.slo.ttft_s)
        self.tpot_s = sane(self.slo.tpot_s)
        self.due_s = request.arrival_s + self.ttft_s
        self.end_s = request.arrival_s + sane(self.slo.e2e_s)
        self.length = 0.0
        self.tokens_per_step = self.least_tokens = 1.0
        self.anchor_s = inf
        self.pace_s = self.paced_s = 0.0
        self.paced_tokens = 0

    @property
    def first_objective(self) -> str:
        """Name of the objective that sets `due_s`."""
        return "ttft" if self.ttft_s >= sane(self.slo.ttft_s) else "e2e"

    def pace_objective(self, step_s: float) -> str:
        """Return the name of the objective that is missed if each of its tokens takes `step_s` seconds."""
        tpot_s = self.slo.tpot_s
        return "tpot" if tpot_s is not None and (self.end_s == inf or tpot_s < step_s) else "e2e"

    @property
    def step_pace_s(self) -> float:
        """Longest mean time between its steps that meets its TPOT objective, inf without one."""
        return self.tpot_s * self.tokens_per_step

    @property
    def next_due_s(self) -> float:
        """Deadline of the next token, inf before a pace is set."""
        return self.anchor_s + self.pace_s * len(self.tokens)

    def set_pace(self, margin: float, from_s: float, from_tokens: int) -> None:
        """Set token deadlines from `from_s` on, when it had `from_tokens` tokens.

        `margin` is the share of the objective by which they are brought forward.
        """
        self.paced_s, self.paced_tokens = from_s, from_tokens
        self.pace_s = self.tpot_s * (1 - margin)
        self.anchor_s = from_s - from_tokens * self.pace_s


T = TypeVar("T", bound=Track)


class RequestStages(Generic[T]):
    """Live requests in three stages, as records of the policy's `kind`. `filling`: they run, and their prompt is not
    fully planned yet.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self.waiting: dict[str, T] = {}
        self.filling: dict[str, T] = {}
        self.decoding: dict[str, T] = {}

    def observe(self, event: Event) -> T | None:
        """Move a request to its new stage and return its track, None for other events."""
        if isinstance(event, Queued):
            return self._queue(event.request)
        if isinstance(event, Admitted):
            track = self.waiting.pop(event.request_id)
            self.filling[event.request_id] = track
            return track
        if isinstance(event, Ended):
            return self._remove(event.request_id)
        return None

    def promote(self) -> list[T]:
        """Move requests whose prompt is fully planned to `decoding`, and return them."""
        if not self.filling:
            return []
        done = [track for track in self.filling.values() if is_filled(track.request)]
        for track in done:
            del self.filling[track.request.request_id]
            self.decoding[track.request.request_id] = track
        return done

    def _queue(self, request: Request) -> T:
        track = self._remove(request.request_id) or self._kind(request)
        self.waiting[request.request_id] = track
        return track

    def _remove(self, request_id: str) -> T | None:
        for stage in (self.decoding, self.filling, self.waiting):
            track = stage.pop(request_id, None)
            if track is not None:
                return track
        return None


def sane(objective_s: float | None) -> float:
    return inf if objective_s is None else max(MIN_OBJECTIVE_S, min(objective_s, MAX_OBJECTIVE_S))


def is_filled(request: Request) -> bool:
    return request.planned >= request.prompt_len and request.remaining <= 1


class TpotBatch(Generic[T]):
    """Decoding requests with a TPOT objective, with sums over them that adding and removing keep up to date.

    Without the last of the tightest requests, sums are computed again when they are read: what is left of them may be
    smaller than their rounding errors.
    """

    def __init__(self, reads: ContextReads = WHOLE_CONTEXT) -> None:
        self._reads = reads
        self._tracks: dict[str, T] = {}
        self._smallest_s = inf
        self._tightest = 0  # requests with that pace
        self._tokens_per_s = self._context_per_s = 0.0
        self._is_summed = True

    def __len__(self) -> int:
        return len(self._tracks)

    def __iter__(self) -> Iterator[T]:
        return iter(self._tracks.values())

    def __contains__(self, track: T) -> bool:
        return track.request.request_id in self._tracks

    @property
    def smallest_s(self) -> float:
        """Smallest `step_pace_s`, inf without any."""
        self._sum()
        return self._smallest_s

    @property
    def tokens_per_s(self) -> float:
        """Rows that all of these need per second."""
        self._sum()
        return self._tokens_per_s

    @property
    def context_per_s(self) -> float:
        """Context tokens that have to be read for these per second, at each request's expected mean length."""
        self._sum()
        return self._context_per_s

    @property
    def rows(self) -> float:
        """Mean rows per step, if steps come as often as the tightest objective needs: SCORPIO's virtual batch size."""
        return self.smallest_s * self.tokens_per_s if self._tracks else 0.0

    def add(self, track: T) -> None:
        self._tracks[track.request.request_id] = track
        self._count(track, 1)

    def remove(self, track: T) -> None:
        del self._tracks[track.request.request_id]
        self._count(track, -1)
        self._is_summed &= self._tightest > 0

    def move_to_end(self, tracks: Iterable[T]) -> None:
        """Move tracks whose pace has changed to the end, and compute all sums again."""
        for track in tracks:
            self._tracks[track.request.request_id] = self._tracks.pop(track.request.request_id)
        self.sum_again()

    def sum_again(self) -> None:
        """Compute all sums again when they are read, since paces have changed."""
        self._is_summed = False

    def _sum(self) -> None:
        if self._is_summed:
            return
        self._is_summed = True
        self._tokens_per_s = self._context_per_s = 0.0
        self._smallest_s, self._tightest = inf, 0
        for track in self:
            self._count(track, 1)

    def _count(self, track: T, sign: int) -> None:
        pace_s = track.step_pace_s
        if pace_s < self._smallest_s:
            self._smallest_s, self._tightest = pace_s, 0
        self._tightest += sign * (pace_s == self._smallest_s)
        self._tokens_per_s += sign / pace_s
        self._context_per_s += sign * self._reads.of(track.request.prompt_len + track.length / 2) / pace_s


# --- the objective of a whole request (`e2e_ms`), for policies that know only first tokens and paces -----------------
def latest_first_token_s(track: Track, length: float, params: CostParams) -> float:
    """Return the latest time of the first token at which the last one can be in time (inf without an objective).

    `length` is the expected number of output tokens. Later tokens are assumed to take as long as on an idle machine,
    which is a lower bound.
    """
    alone_s = params.alone_s(track.request.prompt_len + length / 2)
    return track.end_s - alone_s * max(0.0, length - 1)


def e2e_pace_s(track: Track, now_s: float, left: float) -> float:
    """Return the seconds that each of `left` tokens may take (inf without an objective, 0 past the deadline)."""
    return max(0.0, track.end_s - now_s) / max(1.0, left)
