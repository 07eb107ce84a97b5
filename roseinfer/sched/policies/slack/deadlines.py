"""Deadlines of tokens: how an objective for the whole request becomes some, who is behind, and who cannot catch up."""

from collections.abc import Sequence
from math import inf

from roseinfer.core.slo import Cause
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.terms import REFRESH_S
from roseinfer.sched.policy import View, rejectable

MIN_PACE_STEPS = 1.1  # lower bound on a derived TPOT, in steps of the request alone
# The same for paces derived from a deadline: a faster one would delay all others because of one guessed length.
MIN_WHOLE_PACE_STEPS = 2.0
MIN_LENGTH_ERROR_TOKENS = 64.0  # many outputs are this long, whatever their expected length
LIKELY_SHARE = 0.9  # of similar outputs, which are no longer than what a pace allows for
MIN_FIRST_SHARE = 0.1  # of the time to a deadline, for the prompt
MIN_TRUSTED_STEPS = 50  # observed steps after which the cost model may call an objective unattainable


def measure(state: SlackState, now_s: float) -> None:
    """Compute the slack of every decoding request, and demote those that cannot catch up. Tokens in flight count as
    known. With planned drafts a step gives several tokens, and the last of these counts.
    """
    drafts, lost = state.plan.drafts, list[SlackTrack]()
    for track in state.batch:
        slack_s = track.anchor_s + track.pace_s * (len(track.tokens) + track.request.pending) - now_s
        if drafts:
            slack_s += (track.tokens_per_step - 1) * track.pace_s
        track.slack_s = slack_s
        if slack_s < 0 and _is_lost(state, track):
            lost.append(track)
    for track in lost:  # from now on they decode in spare time
        state.batch.remove(track)
        track.is_demoted = True
        set_aside(state, track, now_s)


def _is_lost(state: SlackState, track: SlackTrack) -> bool:
    """True if a request stays late even if it decodes in fast steps to its end."""
    done = len(track.tokens) - track.paced_tokens
    late_s = -track.slack_s - (track.tpot_s - track.pace_s) * done  # relative to the objective itself
    return late_s > 0 and late_s > _makes_up_s(state, track)


def _makes_up_s(state: SlackState, track: SlackTrack) -> float:
    """Return how late it may be now and still be in time at its end, if steps are fast from now on."""
    p, half = state.params, 0.5 * len(state.batch)
    fast_s = 1.05 * p.step_s + p.row_s * half + p.experts_s(half)
    return state.left(track) * (track.tpot_s - fast_s / track.tokens_per_step)


def spare_s(state: SlackState, now_s: float) -> float:
    """Return by how many seconds all decoding requests may be delayed, if they make up for it before they end."""
    return min([track.next_due_s - now_s + _makes_up_s(state, track) for track in state.batch], default=inf)


def set_aside(state: SlackState, track: SlackTrack, now_s: float) -> None:
    track.idle_s = now_s
    track.is_promised = False
    state.unpromised[track.request.request_id] = track


def begin_to_decode(state: SlackState, now_s: float) -> None:
    """Let requests with a fully planned prompt decode, and count deadlines from first tokens once they are seen."""
    for name, track in list(state.first_token_in_flight.items()):
        if track.request.first_token_s:
            del state.first_token_in_flight[name]
            if track in state.batch:
                state.set_pace(track, track.request.first_token_s, track.request.prompt_len)
    for track in state.ledger.promote():
        first_s = track.request.first_token_s
        if track.end_s < inf:
            pace_whole(state, track, first_s or now_s)
        if track.tpot_s == inf or track.is_demoted or unattainable(state, track):
            set_aside(state, track, now_s)
            continue
        state.set_pace(track, first_s or now_s, track.request.prompt_len)
        state.batch.add(track)
        if not first_s:
            state.first_token_in_flight[track.request.request_id] = track


# --- the objective of a whole request ---------------------------------------------------------------------------
def bound_whole(state: SlackState, track: SlackTrack) -> None:
    """Derive TTFT and TPOT objectives from a deadline for the last token, at the present step time. A tenth of the time
    is for the prompt. The pace is that of the expected length: one for its error would keep out requests that fit.
    After the first token, `pace_whole` sets the pace from the time left.
    """
    if track.end_s == inf:
        return
    arrival_s = track.request.arrival_s
    whole_s = track.end_s - arrival_s
    latest_s = _latest_s(state, track, max(MIN_PACE_STEPS * state.alone_s(track), state.recent_step_s))
    if arrival_s + latest_s < track.due_s:
        track.ttft_s, track.due_s, track.margin_s = latest_s, arrival_s + latest_s, 0.0
    pace_s = (1 - MIN_FIRST_SHARE) * whole_s / max(1.0, track.length)
    pace_s = max(pace_s, MIN_WHOLE_PACE_STEPS * state.alone_s(track))
    track.tpot_s = min(track.tpot_s, pace_s)


def pace_whole(state: SlackState, track: SlackTrack, now_s: float) -> None:
    """Set its pace so that the time left until its deadline suffices for most outputs that are like it so far."""
    left = state.left(track)
    track.length = track.request.num_outputs + left
    likely = max(left, state.left(track, LIKELY_SHARE))
    least_s = max(MIN_WHOLE_PACE_STEPS * state.alone_s(track), state.price.pace_s, state.price.fastest_s)
    track.tpot_s = min(track.slo.tpot_s or inf, max((track.end_s - now_s) / likely, least_s))


def pace_outlived(state: SlackState, now_s: float) -> None:
    """Set a faster pace for requests with a deadline that have exceeded their expected length."""
    pace_s = state.price.pace_s
    whole = [track for track in state.batch if track.end_s < inf]
    late = [t for t in whole if t.request.num_outputs > t.length - 1 or (t.tpot_s < pace_s and not t.slo.tpot_s)]
    for track in late:
        pace_whole(state, track, now_s)
        state.set_pace(track, now_s, len(track.tokens))
    if late:
        state.batch.move_to_end(late)


def likely_error(state: SlackState, track: SlackTrack) -> float:
    """Return the likely error of its expected length: that of others, at most half of it or a fixed minimum."""
    return min(state.length_error, max(0.5 * track.length, MIN_LENGTH_ERROR_TOKENS))


def longest(state: SlackState, track: SlackTrack, length: float) -> float:
    """Return the tokens of the longest likely output, of a request that is expected to have `length` tokens."""
    return min(length + likely_error(state, track), max(length, track.request.params.max_tokens))


def _latest_s(state: SlackState, track: SlackTrack, step_s: float) -> float:
    """Return the most seconds from arrival to first token with which the longest likely output is in time."""
    whole_s = track.end_s - track.request.arrival_s
    return max(whole_s - step_s * longest(state, track, track.length), MIN_FIRST_SHARE * whole_s)


# --- what cannot be kept ----------------------------------------------------------------------------------------
def unattainable(state: SlackState, track: SlackTrack) -> bool:
    """True if its TPOT objective or the time to its deadline is too short for lone steps at the usual speed."""
    if state.cost.steps < MIN_TRUSTED_STEPS:
        return False
    alone_s = state.alone_s(track) / state.cost.slowed
    least_s = alone_s * (track.length - likely_error(state, track))
    if track.least_tokens > 1:
        alone_s = state.yields.step_s(track.request, state.cost.params)
    return track.tpot_s * track.least_tokens < alone_s or least_s > track.end_s - track.request.arrival_s


def misses_alone(state: SlackState, track: SlackTrack) -> bool:
    """True if even an idle machine would have rejected it at its arrival."""
    alone_s = state.alone_s(track)
    first_s = state.prefill_s(len(track.tokens))
    whole_s = first_s + alone_s * max(0.0, track.length - likely_error(state, track))
    late = first_s > min(track.slo.ttft_s or inf, _latest_s(state, track, MIN_PACE_STEPS * alone_s))
    return late or whole_s > track.end_s - track.request.arrival_s or unattainable(state, track)


def unreachable(state: SlackState, view: View, now_s: float) -> Sequence[SlackTrack]:
    """Return the waiting requests that even an idle machine could no longer serve in time; looks at intervals.

    Only this sees requests that wait for their adapter, and names that cause.
    """
    found = list[SlackTrack]()
    if now_s < state.overdue_again_s:
        return found
    state.overdue_again_s = now_s + REFRESH_S
    for track in [t for t in state.ledger.waiting.values() if t.latest_s < now_s or t.request.loading is Cause.ADAPTER]:
        request = track.request
        if lacks_adapter := request.loading is Cause.ADAPTER:
            track.waits_for = Cause.ADAPTER
        prefill_s = state.prefill_s(view.uncached(request)) + view.load_s(request)
        if track.due_s - prefill_s < now_s and rejectable(request) and (lacks_adapter or view.can_start(request)):
            found.append(track)
    return found
