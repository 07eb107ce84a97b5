"""Attainable objectives: the value that a rejected request's objective should have had to be admitted."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.slack.capacity import Demand
from roseinfer.sched.policies.slack.state import MIN_PACE_STEPS, SlackState

MIN_SAFETY_RATIO = 1.15  # of reported to expected value: requests that arrive meanwhile take their part
MIN_SLOWDOWN_RATIO = 1.15  # of a tried pace to the one before
MAX_TRIES = 24


class Chances(NamedTuple):
    """Machine after the starts of a step. `smallest_s`: tightest TPOT objective. `ahead_s`: seconds of started prompts.

    `prefill_time(seconds)`: seconds of these that prompts get. `has_place(track)`: there are a seat and KV blocks for
    it. `idle`: no request runs or starts.
    """

    state: SlackState
    now_s: float
    demand: Demand
    smallest_s: float
    ahead_s: float
    idle: bool
    prefill_time: Callable[[float], float]
    has_place: Callable[[Track], bool]

    def least_s(self, track: Track, reason: str, load_s: float) -> float | None:
        """Return the smallest value of the objective `reason` with which the request could start now and be in time.
        Return None if that depends on when other requests end, or on how many arrive. `load_s`: time of its load.
        """
        if not self.has_place(track):
            return None
        assert track.uncached is not None
        start = len(track.tokens) - track.uncached
        prefill_s = self.state.cost.params.prefill_s(start, track.uncached, self.state.beside)
        first_s = load_s + self._first_s(track, prefill_s)
        if reason == "ttft":
            return first_s if self._fits(track, track.tpot_s, prefill_s, first_s) else None
        if reason == "tpot" and first_s > track.ttft_s:
            return None
        pace_s = self._pace_s(track, prefill_s, first_s)
        if pace_s is None or reason == "tpot":
            return pace_s
        length = max(track.length, self.state.lengths.total(track.request))  # as it would be expected now
        behind = max(1.0, length + self.state.wrong_by(track))
        return (first_s + behind * max(pace_s, self.state.recent_step_s)) / 0.9

    def _first_s(self, track: Track, prefill_s: float) -> float:
        """Return the seconds from arrival to first token, after all started prompts."""
        wanted_s = self.ahead_s + prefill_s
        left_s = wanted_s / max(1e-9, self.prefill_time(1.0))
        for _ in range(MAX_TRIES):
            if self.prefill_time(left_s) >= wanted_s:
                break
            left_s *= MIN_SLOWDOWN_RATIO
        waited_s = self.now_s - track.request.arrival_s
        return waited_s + MIN_SAFETY_RATIO * (left_s + self.state.chunk_ends_s + self.state.cost.params.step_s)

    def _pace_s(self, track: Track, prefill_s: float, first_s: float) -> float | None:
        """Return the fastest pace that fits together with the running requests; None if none does."""
        state = self.state
        pace_s = MIN_PACE_STEPS * state.cost.params.rows_s(1, len(track.tokens) + track.length)
        pace_s = MIN_SAFETY_RATIO * max(pace_s, state.price.pace_s)
        for _ in range(MAX_TRIES):
            if self._fits(track, pace_s, prefill_s, first_s):
                return pace_s
            pace_s *= MIN_SLOWDOWN_RATIO
        return None

    def _fits(self, track: Track, pace_s: float, prefill_s: float, first_s: float) -> bool:
        state, tuning = self.state, self.state.tuning
        smallest_s = min(self.smallest_s, pace_s)
        if smallest_s == inf or self.idle:
            return True
        mean_s = state.price.mean_s
        limit = tuning.roomy if state.objection(track) else 1.0
        limit -= tuning.reserve * (min(2.0, track.price_s / mean_s) if mean_s else 1.0)
        usable = state.usable_share(smallest_s)
        demand = self.demand.with_one(
            track.weight * track.tpot_s / pace_s if pace_s < inf else 0.0, pace_s, prefill_s, first_s
        )
        return demand.fits(limit, usable, state.cost.params)
