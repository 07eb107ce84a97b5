"""Promises: what the slack policy publishes for routers."""

from bisect import bisect_left
from collections.abc import Callable
from math import inf

from roseinfer.core.promise import DUE_S, Promise
from roseinfer.core.request import Request
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.terms import REFRESH_S


class Promises:
    """Maker of promises. Sums over decoding requests are maintained anyway, and the others are visited one by one.

    How much of a prompt is cached is looked up once, when a request begins to wait, and used again when it starts.
    """

    def __init__(self, state: SlackState) -> None:
        self._state = state
        self._left, self._left_s = 0.0, -inf  # tokens that decoding requests will add, and the time of that estimate

    def make(self, counts: Promise, block_size: int, uncached: Callable[[Request], int], ends_s: float) -> Promise:
        """Return `counts` completed with what the policy knows. `ends_s`: when the newest planned step ends."""
        state, at_s = self._state, counts.at_s
        p, batch = state.params, state.batch
        smallest_s, weights, fill, best_effort = state.smallest_s, 0.0, 0, 0
        growth = self._to_decode(at_s)
        waiting = [0] * len(DUE_S)
        if state.promised:  # else fifo plans, and no request has objectives
            for track in [track for track in state.ledger.filling.values() if track.is_promised]:
                left = track.request.remaining
                weights += track.weight
                fill += left
                growth += left + track.length
        for track in state.ledger.waiting.values():
            if not track.is_promised:
                best_effort += 1
                continue
            tokens = track.count_uncached(uncached)
            weights += track.weight
            growth += tokens + track.length
            waiting[bisect_left(DUE_S, track.due_s - at_s)] += tokens
        step_s = max(0.0, ends_s - at_s) if state.promised else state.recent_step_s
        return counts._replace(
            step_s=step_s if counts.running else 0.0,
            cost=p.published,
            usable_share=state.usable_share(smallest_s),
            smallest_s=smallest_s,
            busy=state.decoding_share,
            weights=weights,
            arriving=state.arriving(at_s),
            fill_tokens=fill,
            waiting_tokens=tuple(waiting),
            output_tokens=state.lengths.usual,
            best_effort=best_effort,
            growth_blocks=int(growth) // block_size,
            experts=p.experts.read(max(1.0, batch.rows)) if p.experts is not None else 0.0,
        )

    def _to_decode(self, now_s: float) -> float:
        """Return the tokens that decoding requests will add; estimated at intervals, because it is expensive."""
        state = self._state
        if not len(state.batch):
            return 0.0
        if now_s - self._left_s >= REFRESH_S:
            self._left, self._left_s = sum([state.left(track) for track in state.batch]), now_s
        return self._left
