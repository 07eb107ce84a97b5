"""One step of the slack policy: how long it may take, its decoding rows, and its prompt tokens."""

from collections.abc import Container, Sequence
from math import inf

from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.sched.policies.common.ledger import Track
from roseinfer.sched.policies.common.planned import ExplainedDecision
from roseinfer.sched.policies.slack.admission import SlackAdmission
from roseinfer.sched.policies.slack.state import SlackState
from roseinfer.sched.policy import Decision, View


class SlackStep:
    """Planner of one step. `seconds`: expected duration. `limit_s`: allowed duration, inf without token deadlines."""

    def __init__(self, state: SlackState, view: View, now_s: float, in_flight: bool) -> None:
        self.seconds = 0.0
        self.limit_s = inf
        self._state = state
        self._tuning = state.tuning
        self._params = state.cost.params
        self._view = view
        self._now_s = now_s
        self._in_flight = in_flight

    def decide(self) -> Decision:
        state, p = self._state, self._params
        self._measure()
        admission = SlackAdmission(state, self._view, self._now_s)
        admission.run(self._slacks, self._context)
        filling = state.ledger.filling.values()
        prompts = [*((track, track.request.remaining) for track in filling), *admission.admitted]
        self._rows = list(state.batch.tracks)
        prompts.sort(key=self._urgency)
        self._decode_s = p.rows_s(len(self._rows), sum(self._context))
        room = self._room(prompts)
        self._take_turns()
        chunks, starts = self._share(prompts, room)
        self.seconds = self._decode_s + self._prefill_s
        rows, yielding = [track.request for track in self._rows], set(admission.yields)
        rows += self._leftovers(yielding, len(rows) + sum(chunks.values()))
        if not rows and not chunks:  # at least one request has to compute
            rows = [track.request for track in state.ledger.decoding.values() if track.request not in yielding]
        rows += [track.request for track in filling]
        refused = list(admission.rejections.values())
        decision = ExplainedDecision(rows, chunks, starts, refused, self._yields, admission.yields)
        decision.explain(state.cause_changes, admission.default_cause or Cause.UTILISATION)
        state.cause_changes = []
        return decision

    def _measure(self) -> None:
        """Compute the slack of every decoding request, and demote those that cannot catch up."""
        batch, now_s = self._state.batch, self._now_s
        self._context = batch.context()
        due = batch.due_in_flight(self._context) if self._in_flight else batch.due(self._context)
        self._slacks = [at_s - now_s for at_s in due]
        if due and min(due) < now_s:
            lost = [track for track, slack in zip(batch.tracks, self._slacks, strict=True) if self._lost(track, slack)]
            for track in lost:
                self._state.demote(track, now_s)
            if lost:
                self._measure()

    def _lost(self, track: Track, slack: float) -> bool:
        """True if a request stays late even if it decodes in fast steps to its end."""
        done = len(track.tokens) - track.paced_tokens
        late_s = -slack - (track.tpot_s - track.pace_s) * done  # relative to the objective itself
        if late_s <= 0:
            return False
        if track.tpot_s < self._state.price.pace_s:  # it would delay others for more than it is worth
            return True
        p, half = self._params, 0.5 * len(self._state.batch)
        fast_s = 1.05 * p.step_s + p.row_s * half + p.experts_s(half)
        left = self._state.lengths.left(track.request, max(1, track.outputs))
        return late_s > max(0.0, left * (track.tpot_s - fast_s))

    def _can_wait(self, prompt: tuple[Track, int]) -> bool:
        """True if a prompt comes after those with objectives: it has none, and has not waited long."""
        request = prompt[0].request
        return not prompt[0].is_promised and self._now_s < request.arrival_s + self._tuning.ageing_s

    def _urgency(self, prompt: tuple[Track, int]) -> tuple[bool, bool, float]:
        """Sort key of prompts: deadline, running or not; those that are certainly late come after the others."""
        track, left = prompt
        if not track.is_promised:
            return self._can_wait(prompt), False, 0.0
        late = track.due_s < self._now_s + self._chunk_s(track, left)
        return False, late, min(track.due_s, track.request.arrival_s + self._tuning.ageing_s)

    # --- contents of the step -----------------------------------------------------------------------------------
    def _room(self, prompts: Sequence[tuple[Track, int]]) -> float:
        """Return the seconds for prompts before a token is late. Rows with much slack may be left out for prompts."""
        state = self._state
        if not self._rows:
            return inf
        smallest_s = state.batch.smallest_s
        least = min(self._slacks)
        paced_s = smallest_s * (1 - state.margins.of(smallest_s))
        spent_s = min(least, max(least - state.stall_s, paced_s))  # the reserve for the next stall is not spent
        tau = min(max(spent_s, self._decode_s), self._tuning.longest_step * smallest_s)
        self.limit_s = tau
        room_s = tau - self._decode_s
        owed = [(track, left) for track, left in prompts if track.is_promised]
        wanted_s = sum([self._params.prefill_s(_start(track, left), left, inf) for track, left in owed])
        wanted_s += self._params.experts_s(sum([left for _, left in owed]), len(self._rows))
        over_s = self._decode_s - paced_s + max(0.0, -least) / self._tuning.catch_up
        if wanted_s > room_s or over_s > 0:
            room_s = self._skip(wanted_s - room_s, over_s)
            # The time of skipped rows is for urgent prompts, not for requests that decode in spare time.
            self.limit_s = min(tau, max(spent_s, self._decode_s))
        return room_s

    def _chunk_s(self, track: Track, tokens: int) -> float:
        return self._params.prefill_s(_start(track, tokens), tokens, len(self._rows))

    def _skip(self, short_s: float, over_s: float) -> float:
        """Skip the rows with the most slack, for `short_s` of prompts or because the rows alone take too long. Return
        the seconds that are left for prompts.
        """
        state, p, tau, full_s = self._state, self._params, self.limit_s, self._decode_s
        room_s = tau - full_s
        # A row with less slack would soon be the most urgent one, and steps would become short and many.
        ahead_s = max(full_s, state.batch.smallest_s) + state.stall_s
        order = sorted(range(len(self._rows)), key=self._slacks.__getitem__)
        tracks, skipped = self._rows, set()
        while order:
            index = order[-1]
            slack = self._slacks[index]
            wanted = short_s > 0 and slack > tau + ahead_s
            too_long = over_s > 0 and slack > 2 * self._decode_s
            if not (wanted or too_long):
                break
            order.pop()
            if not self._may_skip(tracks[index], tau):
                continue
            skipped.add(index)
            saved_s = p.one_row_s(self._context[index], len(tracks) - len(skipped))
            self._decode_s -= saved_s
            short_s -= p.one_row_s(self._context[index], inf)  # a prompt would need the same experts
            over_s -= saved_s
            room_s += saved_s
        self._rows = [track for index, track in enumerate(state.batch.tracks) if index not in skipped]
        return room_s

    def _take_turns(self) -> None:
        """Keep only the most urgent rows if there are more than the options allow."""
        most = self._state.options.max_batch_size
        if most is not None and len(self._rows) > most:
            due = {track.request.request_id: track.anchor_s + track.pace_s * len(track.tokens) for track in self._rows}
            self._rows.sort(key=lambda track: due[track.request.request_id])
            del self._rows[most:]

    def _may_skip(self, track: Track, tau: float) -> bool:
        """True if skipping a row keeps the time between its tokens within the gap limit."""
        step = self._view.step
        if track.idle_step != step - 1:
            track.idle_s = self._now_s
        if self._now_s + tau - track.idle_s > self._tuning.gap_limit * track.tpot_s:
            return False
        track.idle_step = step
        return True

    def _share(self, prompts: Sequence[tuple[Track, int]], room_s: float) -> tuple[dict[str, int], list[Request]]:
        """Return prompt tokens by request within the step's seconds and tokens, and the requests that start."""
        options, p, tuning = self._state.options, self._params, self._tuning
        most = min(options.prefill_max_tokens or self._view.token_budget, self._view.token_budget - len(self._rows))
        beside = len(self._rows)  # tokens of the step so far
        if self._rows and room_s < p.prefill_s(0, tuning.smallest_chunk, beside):
            room_s = 0.0
        rest_share = tuning.rest_share if any(track.is_promised for track, _ in prompts) else 1.0
        guarded = room_s <= 0
        if guarded and prompts:
            room_s = self._guard(*next((prompt for prompt in prompts if prompt[0].is_promised), prompts[0]))
            if not room_s:
                room_s, rest_share = self._guard(*prompts[0]), 1.0
        chunks: dict[str, int] = {}
        starts: list[Request] = []
        # For aged prompts without objectives, which come first.
        rest_s = rest_share * min(room_s, p.prefill_s(0, most, beside))
        self._prefill_s = 0.0
        for track, wanted in prompts:
            if room_s <= 0 or most <= 0 or len(starts) >= (options.prefill_max_batch_size or most):
                break
            aged = not track.is_promised and not self._can_wait((track, wanted))
            start = _start(track, wanted)
            tokens = min(most, wanted, options.long_prefill_token_threshold or most)
            spend_s = min(room_s, rest_s) if aged else room_s
            seconds = p.prefill_s(start, tokens, beside)
            if seconds > spend_s:
                worth = guarded or p.is_worth_a_chunk(start, room_s, beside)
                if not worth and not self._guard(track, wanted):  # it waits for a step with more room
                    continue
                tokens = int(p.prefill_tokens(start, spend_s, beside) + 1e-6)
                seconds = p.prefill_s(start, tokens, beside)
            if tokens <= 0:
                continue
            beside += tokens
            rest_s -= seconds if aged else 0.0
            room_s -= seconds
            most -= tokens
            self._prefill_s += seconds
            chunks[track.request.request_id] = tokens
            if tokens == wanted and track.due_s < inf:  # its first token comes when the step ends
                ends_s = (track.due_s - self._now_s) / tuning.unsteady
                if ends_s > self._decode_s + self._prefill_s:
                    self.limit_s = min(self.limit_s, ends_s)
                    room_s = min(room_s, ends_s - self._decode_s - self._prefill_s)
            if track.request.seat is None:
                starts.append(track.request)
        short = Cause.BUDGET if most <= 0 else Cause.QUEUE if chunks else Cause.UTILISATION
        for track, _ in prompts:
            if track.request.seat is None and track.request.request_id not in chunks:
                self._state.set_cause(track, short)
        return chunks, starts

    def _guard(self, track: Track, wanted: int) -> float:
        """Return seconds for a prompt that is about to be late although there is no room. They are at most the smallest
        TPOT objective of the decoding requests.
        """
        tuning, start = self._tuning, _start(track, wanted)
        least_s = self._params.prefill_s(start, tuning.smallest_chunk, len(self._rows))
        if not track.is_promised:
            aged = self._now_s > track.request.arrival_s + tuning.ageing_s
            return least_s if aged else 0.0
        left_s = track.due_s - self._now_s
        if left_s < tuning.guard_steps * self._decode_s + self._chunk_s(track, wanted):
            most_s = self._state.batch.smallest_s if len(self._state.batch) else inf
            chunk_s = self._params.prefill_s(start, min(tuning.guard_chunk, wanted), len(self._rows))
            return min(chunk_s, max(most_s, least_s))
        return 0.0

    def _leftovers(self, yielding: Container[Request], beside: int) -> list[Request]:
        """Return the unpromised requests that decode: while the step stays within its limit, or if they waited long.
        `beside`: tokens of the step without them.
        """
        p, chosen = self._params, list[Request]()
        for track in self._state.unpromised.values():
            if track.request in yielding:
                continue
            row_s = p.one_row_s(len(track.tokens), beside + len(chosen))
            if self.seconds + row_s < self.limit_s or self._now_s - track.idle_s > self._tuning.idle_limit_s:
                track.idle_s = self._now_s
                self.seconds += row_s
                chosen.append(track.request)
        return chosen

    def _yields(self, request: Request) -> float:
        """Key of victims when blocks run out: first requests without token deadlines, then those with most slack."""
        track = self._state.ledger.decoding.get(request.request_id)
        if track is None or track not in self._state.batch:
            return inf
        return track.anchor_s + track.pace_s * len(track.tokens)


def _start(track: Track, left: int) -> int:
    """Return the position of the first of a request's last `left` prompt tokens."""
    return len(track.tokens) - left
