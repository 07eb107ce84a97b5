"""What could have been kept of an objective for which the slack policy turns a request away."""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.slack.capacity import Demand
from roseinfer.sched.policies.slack.state import FASTEST, SlackState

SAFETY = 1.15  # times what is expected: others that come meanwhile take their part
SLOWER = 1.15  # times as slow as the last pace that was tried
MOST_TRIED = 24


class Chances(NamedTuple):
    """The machine behind the starts of a step. `smallest_s`: the tightest TPOT objective there. `ahead_s`: seconds of
    prompts that have started. `prefill_time(seconds)`: how many of so many are there for prompts. `has_place(track)`:
    whether there are a seat and KV blocks for it. `idle`: whether nobody runs or starts.
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
        """The least value of the objective `reason` with which the request could start now, behind its load, and be in
        time; None if that depends on when others end, or on how many come.
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
        """From its arrival to its first token, behind all prompts that have started."""
        wanted_s = self.ahead_s + prefill_s
        left_s = wanted_s / max(1e-9, self.prefill_time(1.0))
        for _ in range(MOST_TRIED):
            if self.prefill_time(left_s) >= wanted_s:
                break
            left_s *= SLOWER
        waited_s = self.now_s - track.request.arrival_s
        return waited_s + SAFETY * (left_s + self.state.chunk_ends_s + self.state.cost.params.step_s)

    def _pace_s(self, track: Track, prefill_s: float, first_s: float) -> float | None:
        """The fastest pace at which it fits beside those that run."""
        state = self.state
        pace_s = FASTEST * state.cost.params.rows_s(1, len(track.tokens) + track.length)
        pace_s = SAFETY * max(pace_s, state.price.pace_s)
        for _ in range(MOST_TRIED):
            if self._fits(track, pace_s, prefill_s, first_s):
                return pace_s
            pace_s *= SLOWER
        return None

    def _fits(self, track: Track, pace_s: float, prefill_s: float, first_s: float) -> bool:
        state, tuning = self.state, self.state.tuning
        smallest_s = min(self.smallest_s, pace_s)
        if smallest_s == inf or self.idle:
            return True
        mean_s = state.price.mean_s
        limit = tuning.roomy if state.objection(track) else 1.0
        limit -= tuning.reserve * (min(2.0, track.price_s / mean_s) if mean_s else 1.0)
        keep = state.keep(smallest_s)
        demand = self.demand.with_one(
            track.weight * track.tpot_s / pace_s if pace_s < inf else 0.0, pace_s, prefill_s, first_s
        )
        return demand.fits(limit, keep, state.cost.params)
