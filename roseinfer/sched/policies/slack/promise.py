"""What the slack policy publishes of itself, for routers."""

from bisect import bisect_left
from collections.abc import Callable

from roseinfer.core.promise import DUE_S, Promise
from roseinfer.core.request import Request
from roseinfer.sched.policies.slack.state import SlackState


def promise_of(
    state: SlackState, counts: Promise, block_size: int, uncached: Callable[[Request], int], ends_s: float
) -> Promise:
    """`counts`, and what the policy knows. `ends_s`: when the newest planned step ends.

    Sums over those that decode are kept up anyway; those that fill or wait are looked at one by one. How much of a
    prompt is cached is asked once, when a request begins to wait: the answer is used again when it starts.
    """
    p, batch, at_s = state.cost.params, state.batch, counts.at_s
    smallest_s, weights, fill, best_effort = batch.smallest_s, 0.0, 0, 0
    waiting = [0] * len(DUE_S)
    if state.promised:  # else fifo plans, and nobody is owed anything
        for track in state.ledger.filling.values():
            if track.owed:
                weights += track.weight
                fill += track.request.remaining
                if track.tpot_s < smallest_s:
                    smallest_s = track.tpot_s
    for track in state.ledger.waiting.values():
        if not track.owed:
            best_effort += 1
            continue
        if track.uncached < 0:
            track.uncached = uncached(track.request)
        weights += track.weight
        waiting[bisect_left(DUE_S, track.due_s - at_s)] += track.uncached
    step_s = max(0.0, ends_s - at_s) if state.promised else state.recent_step_s
    return Promise(
        at_s,
        step_s if counts.running else 0.0,
        counts.steps,
        (p.step_s, p.token_s, p.row_s, p.context_s),
        state.keep(smallest_s),
        smallest_s,
        p.row_s * batch.tokens_per_s + p.context_s * batch.context_per_s,
        weights,
        state.arriving(at_s),
        fill,
        tuple(waiting),
        state.lengths.usual,
        counts.running,
        counts.waiting,
        best_effort,
        counts.free_seats,
        counts.free_blocks,
        int(state.growth) // block_size if counts.running else 0,
    )
