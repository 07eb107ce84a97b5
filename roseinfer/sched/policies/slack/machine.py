"""Machine as admission sees it in one step: what is left of it after all starts so far."""

from bisect import insort
from functools import cached_property
from math import inf
from typing import NamedTuple

from roseinfer.core.slo import Cause
from roseinfer.sched.lengths.estimators import peak_tokens
from roseinfer.sched.policies.slack import deadlines
from roseinfer.sched.policies.slack.demand import Demand
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policy import View

MIN_PREFILL_SHARE = 0.13  # of the machine, for prompts
MAX_MADE_UP_SHARE = 0.5  # of the delay for which others could make up
MAX_STRETCH_RATIO = 1.1  # longest real duration of a step, relative to the plan, if a first token is due at its end


class WaitingCandidate(NamedTuple):
    """Waiting request that is considered. `prompt`: tokens to compute, in `own_s` seconds, after the `ahead_s` of the
    started prompts that are due no later. `smallest_s`, `usable_share`, `demand`: those of the machine if it starts.
    `is_free`: no pace limits it, because none is needed, it has run before, or it is alone. `price`: why it is not
    worth its cost at present, None if it is.
    """

    track: SlackTrack
    prompt: int
    own_s: float
    ahead_s: float
    smallest_s: float
    usable_share: float
    demand: Demand
    is_free: bool
    price: Cause | None


class StepMachine:
    """Machine after all starts so far. `admitted`: requests with their prompt tokens, which start while the step has
    tokens. `reserved`: requests that cannot start yet, but hold a seat and KV blocks. `prompts`: deadline and time of
    each started prompt. `smallest_s`: tightest TPOT objective, inf without one. `usable_share`: of the time, with it.
    """

    def __init__(self, state: SlackState, view: View, now_s: float) -> None:
        filling = state.ledger.filling.values()
        self.state = state
        self.view = view
        self.now_s = now_s
        self.admitted: dict[SlackTrack, int] = {}
        self.reserved: list[SlackTrack] = []
        self.seats = min(view.free_seats, state.seats - len(view.running))
        self.blocks = view.free_blocks
        self.smallest_s = state.smallest_s
        self.usable_share = state.usable_share(self.smallest_s)
        self.demand, self.growth, self.beside = state.demand, state.growth, state.beside
        self.prompts = sorted([(t.due_s, state.to_fill_s(t, self.beside)) for t in filling if t.is_promised])

    @property
    def idle(self) -> bool:
        """True if no request runs or starts."""
        return not self.view.running and not self.admitted

    # --- starts -------------------------------------------------------------------------------------------------
    def candidate(self, track: SlackTrack) -> WaitingCandidate:
        prompt = track.count_uncached(self.view.uncached)
        own_s, smallest_s = self.own_s(track, prompt), min(self.smallest_s, track.step_pace_s)
        ahead_s = sum([seconds for due_s, seconds in self.prompts if due_s <= track.due_s])
        demand = self.state.demand_with(self.demand, track, own_s, self.now_s)
        usable_share, price = self.state.usable_share(smallest_s), self.state.objection(track)
        is_free = smallest_s == inf or track.request.has_run or self.idle
        return WaitingCandidate(track, prompt, own_s, ahead_s, smallest_s, usable_share, demand, is_free, price)

    def start(self, candidate: WaitingCandidate) -> None:
        """Take what a request with objectives needs."""
        self.smallest_s, self.usable_share = candidate.smallest_s, candidate.usable_share
        self.demand = candidate.demand
        self.beside += candidate.prompt
        insort(self.prompts, (candidate.track.due_s, candidate.own_s))
        self.admit(candidate.track)

    def admit(self, track: SlackTrack, reserve: bool = False) -> None:
        """Take a seat and KV blocks. `reserve`: it cannot start yet."""
        self.seats -= 1
        self.blocks -= self.blocks_of(track)
        self.growth += track.length
        if reserve:
            self.reserved.append(track)
        else:
            self.admitted[track] = self.view.uncached(track.request)

    # --- time of prompts ----------------------------------------------------------------------------------------
    def own_s(self, track: SlackTrack, prompt: int) -> float:
        """Return the time of a request's last `prompt` tokens, in a step with the other tokens that it has anyway.
        Without decoding rows that limit it, a step is full of prompts.
        """
        beside = self.beside if self.smallest_s < inf else inf
        return self.state.params.prefill_s(len(track.tokens) - prompt, prompt, beside)

    def prefill_time(self, seconds: float) -> float:
        """Return how many of the next `seconds` prompts get."""
        if seconds <= 0 or seconds == inf:
            return max(0.0, seconds)
        if self.smallest_s == inf:
            p, full_s = self.state.params, self.full_s
            leftover_s = p.decode_s([len(track.tokens) for track in self.state.unpromised.values()])
            return seconds * full_s / (full_s + (p.step_s + p.experts_s(inf)) + leftover_s)
        left_s = self.usable_share * seconds - self.demand.taken_s(seconds, self.state.params)
        return max(left_s, MIN_PREFILL_SHARE * seconds)

    @property
    def full_s(self) -> float:
        """Time of the tokens of a step full of prompts."""
        return self.state.params.prefill_s(0, self.view.token_budget, inf)

    @cached_property
    def chunk_ends_s(self) -> float:
        """Delay of a first token in addition to its prompt's turn: the step in flight, and the end of its own step."""
        p, idle = self.state.params, not len(self.state.batch)  # if idle, no row reads experts for it
        return max(p.step_s + (p.experts_s(inf) if idle else 0.0), 2 * self.state.recent_step_s)

    def left_s(self, track: SlackTrack) -> float:
        """Return the time from now until the step of its last prompt tokens has to begin."""
        return track.due_s - self.now_s - self.chunk_ends_s

    def is_in_time_at_once(self, candidate: WaitingCandidate) -> bool:
        """True if it alone waits, and others can make up for a step that computes its prompt as a whole.

        Estimates by horizons would refuse it, although all would be in time.
        """
        state, track = self.state, candidate.track
        if len(state.ledger.waiting) > 1 or self.prompts or track.due_s == inf:
            return False
        first_s = self.view.load_s(track.request) + candidate.own_s + state.params.step_s
        return MAX_STRETCH_RATIO * first_s < track.due_s - self.now_s and self.can_make_up_for(candidate.own_s)

    def can_make_up_for(self, seconds: float) -> bool:
        """True if no decoding request would be late at its end for a step that is longer by `seconds`."""
        return not self.state.price.overloaded and seconds < MAX_MADE_UP_SHARE * self._spare_s

    @cached_property
    def _spare_s(self) -> float:
        return deadlines.spare_s(self.state, self.now_s)

    def is_late(self, candidate: WaitingCandidate) -> bool:
        """True if its first token would be late, although it starts now."""
        track = candidate.track
        left_s = self.left_s(track) - self.view.load_s(track.request)
        return candidate.own_s > self.prefill_time(left_s) - candidate.ahead_s

    # --- KV blocks ----------------------------------------------------------------------------------------------
    def blocks_of(self, track: SlackTrack) -> int:
        """Return the KV blocks of its known tokens."""
        return -(-len(track.tokens) // self.view.block_size)

    def has_blocks(self, track: SlackTrack) -> bool:
        """True if its prompt fits the KV cache now, and its and the running requests' expected peak fits too."""
        view, state = self.view, self.state
        if self.blocks_of(track) > self.blocks:
            return False
        free = min([self.blocks, *[pool.free_blocks for pool in view.windows]])
        if not view.running or self.growth + len(track.tokens) + track.length <= free * view.block_size:
            return True
        again = [other for other in state.preempted.values() if other is not track]
        rows = [*self._decoding, *[(len(t.tokens), max(0.0, t.length - t.request.num_outputs)) for t in again]]
        starting = [*state.ledger.filling.values(), *self.admitted, *self.reserved, track]
        rows += [(len(other.tokens), other.length) for other in starting]
        if not track.is_promised:  # for a promised request these would be preempted
            rows += [(len(other.tokens), 0.0) for other in state.unpromised.values()]
        return all(peak_tokens(rows, window) <= most for window, most in self._capacities)

    @cached_property
    def _decoding(self) -> list[tuple[int, float]]:
        """Tokens held and to come of each decoding request with token deadlines."""
        return [(len(track.tokens), self.state.left(track)) for track in self.state.batch]

    @cached_property
    def _capacities(self) -> list[tuple[float, float]]:
        """Each window (inf: none), and the tokens that its group holds for the running requests and new ones."""
        view, planned = self.view, [request.planned for request in self.view.running]
        groups = ((inf, view.free_blocks), *view.windows)
        return [(window, free * view.block_size + sum([min(p, window) for p in planned])) for window, free in groups]
