"""One step of the slack policy: how long it may take, its decoding rows, and its prompt tokens."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policies.common.planned import ExplainedDecision
from roseinfer.sched.policies.slack.admission import StepAdmission
from roseinfer.sched.policies.slack.demand import MAX_STEP_PACES
from roseinfer.sched.policies.slack.machine import MAX_STRETCH_RATIO, MIN_PREFILL_SHARE, StepMachine
from roseinfer.sched.policies.slack.requests import SlackTrack
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policies.slack.terms import AGEING_S, MAX_IDLE_S, REST_SHARE
from roseinfer.sched.policy import Decision, DraftRoom, RejectedRequest, View

MIN_CHUNK_TOKENS = 16  # but for the first chunk of a step
MAX_SPARE_SHARE = 0.25  # of what a prompt can wait, for the drafts of one step
MAX_GAP_PACES = 4.0  # between two tokens of a request that skips steps
CATCH_UP_STEPS = 32  # in which late requests should be in time again


class StepPrompt(NamedTuple):
    """Started prompt, or one that may start, with `left` tokens to compute. `aged`: it has no objective, but comes
    before others because it has waited long.
    """

    track: SlackTrack
    left: int
    aged: bool

    @property
    def start(self) -> int:
        return len(self.track.tokens) - self.left


@dataclass(slots=True)
class SlackDecision(ExplainedDecision):
    """Decision of one step. `step`: its planner, which knows what drafts may take."""

    step: "SlackStep" = field(kw_only=True)

    def draft_room(self) -> DraftRoom:
        return self.step.draft_room()


class SlackStep:
    """Planner of one step. `seconds`: expected duration. `limit_s`: allowed duration, inf without token deadlines."""

    def __init__(self, state: SlackState, view: View, now_s: float) -> None:
        self.seconds = 0.0
        self.limit_s = inf
        self._state = state
        self._params = state.params
        self._view = view
        self._now_s = now_s
        self._tracks = list(state.batch)  # those that decode in this step
        if view.sitting_out:
            self._tracks = [track for track in self._tracks if track.request not in view.sitting_out]

    def decide(self, admission: StepAdmission) -> Decision:
        state = self._state
        filling = [each for each in state.ledger.filling.values() if each.request not in self._view.sitting_out]
        found = [*((track, track.request.remaining) for track in filling), *admission.machine.admitted.items()]
        prompts = [
            StepPrompt(t, left, not t.is_promised and self._now_s >= t.request.arrival_s + AGEING_S)
            for t, left in found
        ]
        self.seconds = self._rows_s(self._params)
        prompts.sort(key=self._urgency)
        room_s = self._room(prompts, admission.machine)
        self._take_turns()
        chunks, starts = self._share(prompts, room_s)
        rows, yielding = [track.request for track in self._tracks], set(admission.yields)
        rows += self._leftovers(yielding, len(rows) + sum(chunks.values()))
        if not rows and not chunks:  # at least one request has to compute
            rows = [track.request for track in state.ledger.decoding.values() if track.request not in yielding]
        rows += [track.request for track in filling]
        due = [prompt for prompt in prompts if prompt.track.due_s < inf]
        self._unfinished = [each for each in due if chunks.get(each.track.request.request_id, 0) < each.left]
        cause_changes, state.cause_changes = state.cause_changes, []
        return SlackDecision(
            rows,
            chunks,
            starts,
            [RejectedRequest(track.request, rejection) for track, rejection in admission.rejections.items()],
            self._victim_key,
            admission.yields,
            cause_changes=cause_changes,
            unnamed_cause=admission.default_cause or Cause.UTILISATION,
            step=self,
        )

    def draft_room(self) -> DraftRoom:
        """Return what drafts may take: no token may be late for them, and no first token of a prompt that waits.

        Planned ones have their own time.
        """
        state, room_s, planned_s = self._state, self.limit_s - self.seconds, 0.0
        for prompt in self._unfinished:
            spare_s = prompt.track.due_s - self._now_s - self.seconds - self._left_s(prompt)
            room_s = min(room_s, MAX_SPARE_SHARE * spare_s)
        first = {track.request.request_id for track in state.batch if track.least_tokens > 1}
        if state.plan.drafts:  # with more drafts than others, late requests catch up
            first |= {t.request.request_id for t in state.batch if t.slack_s < (t.tokens_per_step - 1) * t.pace_s}
            if self._tracks:
                planned_s = self._rows_s(self._params) - self._rows_s(state.cost.params)
        return DraftRoom(max(0.0, room_s) + planned_s, first, state.plan.drafts > 0)

    def _rows_s(self, params: CostParams) -> float:
        """Return the time of a step with its decoding rows only."""
        return params.rows_s(len(self._tracks), params.reads.of(*[len(track.tokens) for track in self._tracks]))

    def _least_s(self) -> float:
        """Return the smallest slack. With planned drafts a row that had bad luck may catch up in later steps."""
        slacks = [track.slack_s for track in self._tracks]
        if not self._state.plan.drafts:
            return min(slacks)
        paces_s = [track.tokens_per_step * track.pace_s for track in self._tracks]
        late = zip(paces_s, slacks, strict=True)
        return min([s if s >= pace_s else pace_s - (pace_s - s) / CATCH_UP_STEPS for pace_s, s in late])

    def _urgency(self, prompt: StepPrompt) -> tuple[int, bool, float]:
        """Sort key: aged ones, then those with objectives by deadline (the certainly late ones last), then the rest."""
        track = prompt.track
        if not track.is_promised:
            return 0 if prompt.aged else 2, False, 0.0
        late = track.due_s + track.margin_s < self._now_s + self._left_s(prompt)
        return 1, late, min(track.due_s, track.request.arrival_s + AGEING_S)

    def _left_s(self, prompt: StepPrompt) -> float:
        """Return the machine time of its tokens left."""
        return self._params.prefill_s(prompt.start, prompt.left, len(self._tracks))

    # --- decoding rows ------------------------------------------------------------------------------------------
    def _room(self, prompts: Sequence[StepPrompt], machine: StepMachine) -> float:
        """Return the seconds for prompts before a token is late, but at least a share of the step. Rows with much slack
        may be left out for prompts.
        """
        state = self._state
        if not self._tracks:
            return inf
        smallest_s = state.batch.smallest_s
        least_s = self._least_s()
        paced_s = smallest_s * (1 - state.margins.of(smallest_s))
        spent_s = min(least_s, max(least_s - state.stall_s, paced_s))  # the reserve for the next stall is not spent
        self.limit_s = min(max(spent_s, self.seconds), MAX_STEP_PACES * smallest_s)
        promised = [prompt for prompt in prompts if prompt.track.is_promised]
        wanted_s = sum([self._params.prefill_s(prompt.start, prompt.left, inf) for prompt in promised])
        wanted_s += self._params.experts_s(sum([prompt.left for prompt in promised]), len(self._tracks))
        room_s = self.limit_s - self.seconds
        over_s = self.seconds - paced_s + max(0.0, -least_s) / CATCH_UP_STEPS
        if wanted_s > room_s or over_s > 0:
            # The time of skipped rows is for urgent prompts, not for requests that decode in spare time.
            room_s += self._skip(wanted_s - room_s, over_s)
            self.limit_s = min(self.limit_s, max(spent_s, self.seconds))
        room_s = max(room_s, MIN_PREFILL_SHARE * self.seconds)
        if len(promised) == 1 and wanted_s > room_s and self._is_due_at_once(promised[0], wanted_s, room_s):
            return MAX_STRETCH_RATIO * wanted_s if machine.can_make_up_for(wanted_s) else room_s
        return room_s

    def _is_due_at_once(self, prompt: StepPrompt, wanted_s: float, room_s: float) -> bool:
        """True if a prompt would be late with that room in each step, but not if this step computes all of it."""
        left_s = prompt.track.due_s - self._now_s
        return wanted_s * (self.seconds + room_s) / room_s > left_s > MAX_STRETCH_RATIO * (self.seconds + wanted_s)

    def _skip(self, short_s: float, over_s: float) -> float:
        """Skip rows with the most slack, for `short_s` of prompts or because the rows take `over_s` too long. Return
        the seconds that they would have taken.

        For a prompt, a row with less slack would soon be the most urgent one, and steps would become short and many.
        """
        state, p, all_s = self._state, self._params, self.seconds
        least_s = self.limit_s + max(all_s, state.batch.smallest_s) + state.stall_s
        skipped = set[SlackTrack]()
        for track in sorted(self._tracks, key=attrgetter("slack_s"), reverse=True):
            wanted = short_s > 0 and track.slack_s > least_s
            too_long = over_s > 0 and track.slack_s > 2 * self.seconds
            if not (wanted or too_long):
                break
            if self._may_skip(track):
                skipped.add(track)
                saved_s = p.one_row_s(len(track.tokens), len(self._tracks) - len(skipped))
                self.seconds -= saved_s
                over_s -= saved_s
                # A prompt would need the same experts.
                short_s -= saved_s if p.experts is None else p.one_row_s(len(track.tokens), inf)
        self._tracks = [track for track in self._tracks if track not in skipped]
        return all_s - self.seconds

    def _may_skip(self, track: SlackTrack) -> bool:
        """True if skipping a row keeps the time between its tokens within the gap limit."""
        step = self._view.step
        if track.idle_step != step - 1:
            track.idle_s = self._now_s
        if self._now_s + self.limit_s - track.idle_s > MAX_GAP_PACES * track.step_pace_s:
            return False
        track.idle_step = step
        return True

    def _take_turns(self) -> None:
        """Keep only the most urgent rows if there are more than the options allow."""
        most = self._state.options.max_batch_size
        if most is not None and len(self._tracks) > most:
            self._tracks.sort(key=attrgetter("next_due_s"))
            del self._tracks[most:]

    def _leftovers(self, yielding: Container[Request], beside: int) -> list[Request]:
        """Return the unpromised requests that decode: while the step stays within its limit, or if they waited long.
        `beside`: tokens of the step without them.
        """
        p, chosen = self._params, list[Request]()
        for track in self._state.unpromised.values():
            if track.request in yielding or track.request in self._view.sitting_out:
                continue
            row_s = p.one_row_s(len(track.tokens), beside + len(chosen))
            waited_s = self._now_s - track.idle_s
            if self.seconds + row_s < self.limit_s or waited_s > MAX_IDLE_S:
                track.idle_s = self._now_s
                self.seconds += row_s
                chosen.append(track.request)
        return chosen

    # --- prompts ------------------------------------------------------------------------------------------------
    def _share(self, prompts: Sequence[StepPrompt], room_s: float) -> tuple[dict[str, int], list[Request]]:
        """Return prompt tokens by request within the step's seconds and tokens, and the requests that start."""
        options, p = self._state.options, self._params
        budget = self._view.token_budget - len(self._tracks)
        most = min(options.prefill_max_tokens or budget, budget)
        most_starts = options.prefill_max_batch_size or most
        beside = len(self._tracks)  # tokens of the step so far
        aged_s = min(room_s, p.prefill_s(0, max(0, most), beside))
        if any(prompt.track.is_promised for prompt in prompts):
            aged_s = max(REST_SHARE * aged_s, p.prefill_s(0, MIN_CHUNK_TOKENS, beside))
        chunks: dict[str, int] = {}
        starts: list[Request] = []
        for prompt in prompts:
            request = prompt.track.request
            if most <= 0 or len(starts) >= most_starts:
                break
            tokens = min(most, prompt.left, options.long_prefill_token_threshold or most)
            tokens = self._chunk(prompt, tokens, aged_s if prompt.aged else room_s, beside)
            if tokens < min(prompt.left, MIN_CHUNK_TOKENS) and (chunks or not tokens):
                continue
            seconds = p.prefill_s(prompt.start, tokens, beside)
            beside += tokens
            most -= tokens
            room_s -= seconds
            aged_s -= seconds if prompt.aged else 0.0
            self.seconds += seconds
            chunks[request.request_id] = tokens
            if tokens == prompt.left and prompt.track.due_s < inf:  # its first token comes when the step ends
                ends_s = (prompt.track.due_s - self._now_s) / MAX_STRETCH_RATIO
                if ends_s > self.seconds:
                    self.limit_s = min(self.limit_s, ends_s)
                    room_s = min(room_s, ends_s - self.seconds)
            if request.seat is None:
                starts.append(request)
        short = Cause.BUDGET if most <= 0 else Cause.QUEUE if chunks else Cause.UTILISATION
        for prompt in prompts:
            if prompt.track.request.seat is None and prompt.track.request.request_id not in chunks:
                self._state.set_cause(prompt.track, short)
        return chunks, starts

    def _chunk(self, prompt: StepPrompt, tokens: int, room_s: float, beside: int) -> int:
        """Return how many of `tokens` fit into `room_s` seconds; 0 if a smaller chunk is not worth its cost."""
        p, start = self._params, prompt.start
        if p.prefill_s(start, tokens, beside) <= room_s:
            return tokens
        if not p.is_worth_a_chunk(start, room_s, beside):
            room_s = self._urgent_s(prompt, room_s, beside)
        return min(tokens, int(p.prefill_tokens(start, room_s, beside) + 1e-6))

    def _urgent_s(self, prompt: StepPrompt, room_s: float, beside: int) -> float:
        """Return the seconds for a chunk whose context costs more than it should: none if the prompt can wait."""
        track = prompt.track
        if track.is_promised:
            urgent = track.due_s < self._now_s + 6 * self.seconds + self._left_s(prompt)
            return room_s if urgent else 0.0
        return self._params.prefill_s(prompt.start, MIN_CHUNK_TOKENS, beside) if prompt.aged else 0.0

    def _victim_key(self, request: Request) -> float:
        """Key of victims when blocks run out: first requests without token deadlines, then those with most slack."""
        track = self._state.ledger.decoding.get(request.request_id)
        return inf if track is None or track not in self._state.batch else track.next_due_s
