"""The engine core: scheduler and runner joined by plans and results, with one or two steps in flight."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from roseinfer.core.clock import Clock
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.observer import StepObserver, unobserved
from roseinfer.core.outputs import FinishReason, RequestOutput, SchedulerStats
from roseinfer.core.plan import StepPlan
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request, sequence_id
from roseinfer.core.runner import Runner
from roseinfer.core.sampling import SamplingParams, Seeds, wrap_int64
from roseinfer.core.slo import Cause
from roseinfer.engine.guided import compiling as held_requests
from roseinfer.engine.guided.compiling import CompilingRequest
from roseinfer.engine.guided.guides import GuidedSequences, GuideEnd, GuideFactory, PendingGuide
from roseinfer.engine.messages import Add, PriorOutput
from roseinfer.sched.scheduler import Scheduler

# How long to wait before asking an engine again that has work but holds all of it back, in seconds.
IDLE_TURN_WAIT_S = 0.002


class _InFlight(NamedTuple):
    """`sampled`: its sampling is launched; not yet, while its masks are missing."""

    plan: StepPlan
    handle: Any
    sampled: bool = True


# A request that turned out to be wrong after `add`, and what is wrong with it.
Refused = tuple[Add, InvalidRequestError]


def arrival_and_deadline(new: Add, now_s: float) -> tuple[float, float | None]:
    """When a request arrived and when it has to end, on the engine's clock, which says `now_s`."""
    if new.age_s is None:
        meta = new.prompt.meta
        return now_s if meta.arrival_s is None else meta.arrival_s, meta.deadline_s
    sent_s = _sent_s(new, now_s)
    return sent_s - new.age_s, None if new.left_s is None else sent_s + new.left_s


def _sent_s(new: Add, now_s: float) -> float:
    """What the message waited to be read counts, if that is known."""
    return now_s if new.sent_s is None else min(new.sent_s, now_s)


class Core(Protocol):
    """What steps requests, as those see it who feed it: `EngineCore`, and what wraps one."""

    scheduler: Scheduler

    def add(self, new: Add) -> None: ...

    def abort(self, sequence_ids: list[str]) -> None: ...

    @property
    def busy(self) -> bool: ...

    @property
    def idle_turn(self) -> bool: ...

    def launch(self) -> list[RequestOutput]: ...

    def settle(self) -> list[RequestOutput]: ...

    def step(self) -> list[RequestOutput]: ...

    def promise(self, now_s: float) -> Promise: ...

    def suspects(self) -> list[str]: ...

    def take_invalid(self) -> list[Refused]: ...

    def stats(self) -> SchedulerStats: ...

    def close(self) -> None: ...


class StepEnd(Protocol):
    """What is to be done at the end of each turn."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class EngineCore:
    """`depth` 1: plan, run, commit. `depth` 2: plan and submit step k + 1 while step k runs, then commit k.

    `eos_ids` end every request that does not ignore them. `seed` seeds the requests that bring none: the n-th such
    request always draws the same way. `guides` constrain the outputs of requests that ask for it; without them such
    requests are refused. `observer` sees the phases `plan` and `commit`; those of the runner are an `ObservedRunner`'s.
    `step_end` is flushed by each `settle`, and closed with the core.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        *,
        depth: int = 1,
        eos_ids: tuple[int, ...] = (),
        vocab_size: int,
        seed: int = 0,
        guides: GuideFactory | None = None,
        observer: StepObserver | None = None,
        step_end: StepEnd | None = None,
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth must be 1 or 2, got {depth}")
        if scheduler.drafter is not None and not runner.capabilities.drafts:
            raise ValueError("a drafter is of no use: the runner verifies no drafts")
        if guides is not None and not runner.capabilities.masks:
            raise ValueError("guides are of no use: the runner samples under no masks")
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self.depth = depth
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self._span = unobserved if observer is None else observer.span
        self._step_end = step_end
        self._seeds = Seeds(seed)
        self._in_flight: deque[_InFlight] = deque()
        self._ended: list[RequestOutput] = []
        self._guided = GuidedSequences(guides, vocab_size)
        self._held: list[CompilingRequest] = []
        self._fresh: list[Add] = []  # came since the last plan
        self._refused: list[Refused] = []
        self._held_back = self._planned = False

    def add(self, new: Add) -> None:
        """Queue the sequences of a request: no model work. Raises `InvalidRequestError`, and then none is queued.

        While a request's grammars are being compiled nobody else knows of it; `take_invalid` has it if that fails.
        """
        self._fresh.append(new)
        try:
            self._take(new)
        except InvalidRequestError:
            self._fresh.pop()
            raise

    def _take(self, new: Add) -> None:
        if new.n < 1:
            raise InvalidRequestError("n must be positive", "n")
        params, guide = new.prompt.params, new.prompt.guide
        if params.bad_words or params.truncate_prompt_tokens is not None:
            raise InvalidRequestError("bad_words and truncate_prompt_tokens are not resolved: call prepare() first")
        self._check_logprobs(params)
        self._check_vocabulary("prompt", new.prompt.ids)
        for name, ids in params.named_token_ids():
            self._check_vocabulary(name, tuple(ids))
        requests = self._make_requests(new)
        pending = self._guided.prepare(guide) if guide and guide.constrains else None
        if pending is None or pending.ready:
            self._queue(requests, pending)
        else:
            self._hold(CompilingRequest(new, requests, pending, self._clock.now()))

    def _queue(self, requests: list[Request], pending: PendingGuide | None) -> None:
        """Hand sequences to the scheduler, all or none."""
        queued: list[Request] = []
        try:
            for request in requests:
                self.scheduler.add(request)
                queued.append(request)
            if pending is not None:
                self._guided.open([request.request_id for request in requests], pending)
                self._replay(requests)
        except InvalidRequestError:
            for request in queued:
                self.scheduler.abort(request.request_id, self._clock.now())
            raise

    def _replay(self, requests: list[Request]) -> None:
        """Tell the guides of sequences that go on here what was said elsewhere."""
        self._ended += self._end(self._guided.replay((r.request_id, r.tokens[r.prompt_len :]) for r in requests))

    def _hold(self, held: CompilingRequest) -> None:
        """Keep a request until its guides can be made."""
        for request in held.requests:
            self.scheduler.check_fits(request)
            if held_requests.holds(self._held, request.request_id):
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        self._held.append(held)

    def _check_logprobs(self, params: SamplingParams) -> None:
        wanted = next((name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None), None)
        if wanted is not None and not self._runner.capabilities.logprobs:
            raise InvalidRequestError(f"{wanted} cannot be had from this engine: it has no model", wanted)

    def _check_vocabulary(self, name: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {self.vocab_size}", name)

    def _make_requests(self, new: Add) -> list[Request]:
        """Those of its samples that have not ended."""
        now_s = self._clock.now()
        arrival_s, deadline_s = arrival_and_deadline(new, now_s)
        waited = {Cause.TRANSIT: new.age_s or 0.0}
        if new.moved or new.outputs is not None:
            waited = {Cause.ENGINE: max(0.0, _sent_s(new, now_s) - arrival_s)}
        params = new.prompt.params
        seed = new.seed if params.seed is None else params.seed
        if seed is None:
            seed = self._seeds.draw(new.n)
        keys = self.scheduler.kv.split_keys(new.keys, len(new.prompt.ids))
        outputs = self._outputs_of(new)
        made = []
        for index in range(new.n):
            said = outputs[index] if outputs else None
            if outputs and said is None:
                continue
            request = self._make_request(new, index, seed)
            request.arrival_s, request.deadline_s, request.keys = arrival_s, deadline_s, keys
            request.waited = waited
            if said is not None:
                request.resume(said.token_ids, said.ttft_s)
            made.append(request)
        return made

    def _outputs_of(self, new: Add) -> list[PriorOutput | None]:
        """What was said of each sample elsewhere; empty for a new request."""
        if new.outputs is None:
            return []
        if len(new.outputs) != new.n or not any(new.outputs):
            raise InvalidRequestError(f"these are no outputs of {new.n} samples, one of which goes on", "outputs")
        for said in new.outputs:
            self._check_vocabulary("outputs", said.token_ids if said else ())
        return new.outputs

    def _make_request(self, new: Add, index: int, seed: int) -> Request:
        prompt, params = new.prompt, new.prompt.params
        if index and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # sample 0 reports them for all
        stop_ids = frozenset(params.stop_token_ids)
        return Request(
            sequence_id(new.request_id, index),
            prompt.ids,
            params,
            prompt.meta,
            seed=wrap_int64(seed + index),
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_ids,
            fork_of=sequence_id(new.request_id, 0) if index else None,
            guided=prompt.guide is not None and prompt.guide.constrains,
        )

    def abort(self, sequence_ids: list[str]) -> None:
        """End requests; the next `step` reports them. Unknown and ended ones are ignored: aborts race with ends."""
        now = self._clock.now()
        for request_id in sequence_ids:
            ended = self.scheduler.abort(request_id, now)
            if ended is None and self._held:
                ended = held_requests.abort(self._held, request_id, now)
            if ended is not None:
                self._ended += self._told([ended])

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight or self._ended or self._held or self.scheduler.has_work)

    @property
    def idle_turn(self) -> bool:
        """Whether the last `step` planned, completed and reported nothing although the engine is busy.

        Asking again at once would be a busy loop: whoever steps the engine waits `IDLE_TURN_WAIT_S` or for news first.
        """
        return self._held_back and self.busy

    def step(self) -> list[RequestOutput]:
        """One turn: `launch` and `settle`."""
        return self.launch() + self.settle()

    def launch(self) -> list[RequestOutput]:
        """The first half of a turn: plan the next step and submit it, without waiting for one that computes.

        Returns what the plan has decided: refusals, timeouts, and what was aborted before. A step that verifies drafts
        is committed before the next one is planned. Its requests would sit that one out otherwise, and two groups that
        take turns cost the weights' way through the machine twice.
        """
        outputs, self._ended = self._ended, []
        self._guided.mask_s = 0.0
        if self._held:
            outputs += self._release_held()
        if self._in_flight and self._in_flight[-1].plan.num_drafts:
            outputs += self._commit_oldest()
        with self._span("plan"):
            plan = self.scheduler.plan(self._clock.now())
        self._fresh.clear()
        outputs += self._told(self.scheduler.take_ended())
        self._planned = plan is not None
        if plan is not None:
            self._submit(plan)
        self._held_back = plan is None and not self._in_flight and not outputs
        return outputs

    def _submit(self, plan: StepPlan) -> None:
        assert not plan.num_drafts or self._runner.capabilities.drafts, "the runner verifies no drafts"
        self._in_flight.append(_InFlight(plan, None, False))  # among the `suspects`, should it fail here
        handle = self._runner.submit(plan)
        if not plan.guided:
            self._runner.sample(handle, None)
        self._in_flight[-1] = _InFlight(plan, handle, not plan.guided)

    def settle(self) -> list[RequestOutput]:
        """The second half: commit the oldest step once `depth` are in flight or no plan was left.

        A step whose masks depend on tokens that are still on their way is launched all the same; the step that brings
        them is committed, and the masks are made, while it runs.
        """
        outputs: list[RequestOutput] = []
        if self._in_flight and not self._in_flight[-1].sampled:
            outputs += self._sample_guided()
        if self._in_flight and not (self._planned and len(self._in_flight) < self.depth):
            outputs += self._commit_oldest()
        if self._held_back and self._held:
            self._guided.wait(IDLE_TURN_WAIT_S)
            self._held_back = False
        if self._step_end is not None:
            self._step_end.flush()
        return outputs

    def _sample_guided(self) -> list[RequestOutput]:
        """Make the masks of the newest step, and launch its sampling."""
        newest = self._in_flight.pop()
        try:
            outputs = self._see_last_tokens(newest.plan)
            masks, ends = self._guided.masks(newest.plan, self._runner.mask_space)
            outputs += self._end(ends)
            self._runner.sample(newest.handle, masks)
        finally:
            self._in_flight.append(newest._replace(sampled=True))
        return outputs

    def _commit_oldest(self) -> list[RequestOutput]:
        """Wait for the oldest step in flight and settle it."""
        oldest = self._in_flight[0]
        result = self._runner.collect(oldest.handle)
        self._in_flight.popleft()
        with self._span("commit"):
            outputs = self.scheduler.commit(oldest.plan, result, self._clock.now())
        return self._told(outputs)

    # --- guides -------------------------------------------------------------------------------------------------
    def _release_held(self) -> list[RequestOutput]:
        """Queue the requests whose guides are ready by now; of those that are not, end what is too late."""
        for held in held_requests.take_ready(self._held, self._clock.now()):
            self._fresh.append(held.new)
            try:
                self._queue(held.requests, held.pending)
            except InvalidRequestError as error:
                self._refused.append((held.new, error))
        return held_requests.expire(self._held, self._clock.now())

    def take_invalid(self) -> list[Refused]:
        """Requests that ended as wrong since the last call, all sequences of each. Nothing else is said of them."""
        refused, self._refused = self._refused, []
        return refused

    def _see_last_tokens(self, plan: StepPlan) -> list[RequestOutput]:
        """Commit the steps in flight that sample for the guided rows of `plan`, which is launched but not sampled."""
        outputs: list[RequestOutput] = []
        if self._in_flight:
            while any(self._guided.depends_on(plan, _guided_names(step.plan)) for step in self._in_flight):
                outputs += self._commit_oldest()
        return outputs

    def _told(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """These outputs, and the ends that guides see behind them."""
        if not self._guided.live:
            return outputs
        return outputs + self._end(self._guided.advance(outputs))

    def _end(self, ends: list[GuideEnd]) -> list[RequestOutput]:
        """End the sequences whose guides say so."""
        now = self._clock.now() if ends else 0.0
        outputs = []
        for end in ends:
            reason = FinishReason.STOP if end.error is None else FinishReason.ERROR
            outputs.append(self.scheduler.finish(end.sequence_id, reason, now, end.error))
        self._guided.close(end.sequence_id for end in ends)
        return [output for output in outputs if output is not None]

    # --- looking in ---------------------------------------------------------------------------------------------
    def promise(self, now_s: float) -> Promise:
        """What the engine says of itself, asked behind `launch`: `now_s` is when the step began."""
        return self.scheduler.promise(now_s)

    def suspects(self) -> list[str]:
        """The sequences that may be why a call of ours has failed.

        Those that came since the last plan, if it got no further; else those that began in the steps in flight or, if
        none did, all that these compute.
        """
        if self._fresh:
            return [sequence_id(new.request_id, index) for new in self._fresh for index in range(new.n)]
        plans = [step.plan for step in self._in_flight]
        began = [new.request_id for plan in plans for new in plan.admitted]
        return began or list(dict.fromkeys(row.request_id for plan in plans for row in plan.rows))

    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        if self._guided.used:
            stats = stats._replace(guides=self._guided.stats()._replace(waiting=len(self._held)))
        return stats

    def close(self) -> None:
        if self._guided.guides is not None:
            self._guided.guides.close()
        if self._step_end is not None:
            self._step_end.close()
        self._runner.close()


def _guided_names(plan: StepPlan) -> set[str]:
    return {plan.rows[row].request_id for row in plan.guided}
