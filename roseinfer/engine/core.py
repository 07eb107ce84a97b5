"""The engine core: scheduler and runner joined by plans and results, with one or two steps in flight."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from roseinfer.core.adapters import Adapter
from roseinfer.core.clock import Clock
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.observer import StepObserver, unobserved
from roseinfer.core.outputs import FinishReason, SchedulerStats, SequenceOutput
from roseinfer.core.plan import StepPlan
from roseinfer.core.pooling import PoolingInfo
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request, RequestMeta, sequence_id
from roseinfer.core.runner import Runner
from roseinfer.core.sampling import Seeds, SequenceParams, wrap_int64
from roseinfer.core.slo import Cause
from roseinfer.engine.adapters import NO_ADAPTERS, AdapterRegistry
from roseinfer.engine.guided import compiling
from roseinfer.engine.guided.compiling import CompilingRequest
from roseinfer.engine.guided.guide import GuideFactory, PendingGuide
from roseinfer.engine.guided.guides import GuidedSequences, GuideEnd
from roseinfer.engine.messages import Add, PriorOutput
from roseinfer.sched.scheduler import Scheduler

# Seconds to wait before the next turn of an engine whose policy lets no request proceed.
IDLE_TURN_WAIT_S = 0.002


class _InFlight(NamedTuple):
    """Submitted step. `sampled`: its sampling is launched; False while its masks are missing."""

    plan: StepPlan
    handle: Any
    sampled: bool = True


# A request that turned out to be invalid after `add`, and its error.
InvalidAdd = tuple[Add, InvalidRequestError]


def arrival_and_deadline(new: Add, now_s: float) -> tuple[float, float | None]:
    """Return arrival and deadline of a request on the engine's clock, whose present time is `now_s`."""
    if new.age_s is None:
        meta = new.prompt.meta
        return now_s if meta.arrival_s is None else meta.arrival_s, meta.deadline_s
    sent_s = _sent_s(new, now_s)
    return sent_s - new.age_s, None if new.left_s is None else sent_s + new.left_s


def _sent_s(new: Add, now_s: float) -> float:
    """Return when the message was sent, if known: the time until it was read counts as age."""
    return now_s if new.sent_s is None else min(new.sent_s, now_s)


class StepEnd(Protocol):
    """Work at the end of each turn."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


def check_pooling(new: Add, info: PoolingInfo | None) -> None:
    """Raise `InvalidRequestError` for a request that does not fit the engine's task.

    `info`: None if the engine generates text.
    """
    prompt = new.prompt
    if info is None:
        raise InvalidRequestError("the model generates text: it returns no embeddings or scores", "model")
    if prompt.pooling is None:
        raise InvalidRequestError(f"the model does not generate text: its task is {info.task}", "model")
    info.check(prompt.pooling)
    if new.n != 1 or new.outputs is not None or prompt.params.max_tokens != 0:
        raise InvalidRequestError("a prompt-only request has one sample without output", "n")
    if not 0 <= prompt.pooling.second_text_from <= len(prompt.ids):
        raise InvalidRequestError("second_text_from must be a position of the prompt", "second_text_from")
    if prompt.meta.slo is not None and prompt.meta.slo.tpot_s is not None:
        raise InvalidRequestError("slo.tpot_s is not supported: the request has no output tokens", "slo.tpot_s")


class EngineCore:
    """Scheduler and runner of one engine.

    `depth` 1: plan, run, commit. `depth` 2: plan and submit step k + 1 while step k runs, then commit step k.

    `eos_ids` end every request that does not ignore them. `seed`: seeds requests without one; the n-th such request
    always draws the same. `guides`: constrain outputs; without them, requests with constraints are invalid. `observer`
    sees the phases `plan` and `commit`. `step_end`: flushed by each `settle`, closed with the core. `pooling`: set if
    all requests are prompt-only. `adapters`: LoRA adapters; without them, requests that name one are invalid.
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
        pooling: PoolingInfo | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth must be 1 or 2, got {depth}")
        if scheduler.drafting is not None and not runner.capabilities.drafts:
            raise ValueError("drafting needs a runner that verifies drafts")
        if runner.capabilities.ahead != (scheduler.drafting is not None and scheduler.drafting.head is not None):
            raise ValueError("a runner with a draft head needs drafting by it, and such drafting needs the runner")
        if guides is not None and not runner.capabilities.masks:
            raise ValueError("guides need a runner that samples under masks")
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.depth = depth
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.adapters = adapters
        self._span = unobserved if observer is None else observer.span
        self._step_end = step_end
        self._pooling = pooling
        self._pools_prompt = pooling is not None and pooling.method.needs_every_position
        self._seeds = Seeds(seed)
        self._in_flight: deque[_InFlight] = deque()
        self._ended: list[SequenceOutput] = []
        self.guided = GuidedSequences(guides, vocab_size)
        if scheduler.drafting is not None:
            scheduler.drafting.constraints = self.guided
        self._compiling: list[CompilingRequest] = []
        self._fresh: list[Add] = []  # added since the last plan
        self._invalid: list[InvalidAdd] = []
        self._is_idle_turn = self._planned = False

    def add(self, new: Add) -> None:
        """Queue the sequences of a request, without model work. Raise `InvalidRequestError`; then none is queued.

        The scheduler gets a request once its grammars are compiled. If that fails, `take_invalid` returns it.
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
        if new.prompt.meta.prefix_scope:
            self._check_scope(new.prompt.meta)
        if params.bad_words or params.truncate_prompt_tokens is not None:
            raise InvalidRequestError("bad_words and truncate_prompt_tokens are not resolved: call prepare() first")
        if new.prompt.pooling is not None or self._pooling is not None:
            check_pooling(new, self._pooling)
        self._check_logprobs(params)
        self._check_vocabulary("prompt", new.prompt.ids)
        if new.prompt.prediction:
            self._check_vocabulary("prediction", new.prompt.prediction)
        for name, ids in params.named_token_ids():
            self._check_vocabulary(name, tuple(ids))
        requests = self._make_requests(new)
        pending = self.guided.prepare(guide) if guide and guide.constrains else None
        if pending is None or pending.ready:
            self._queue(requests, pending)
        else:
            self._await_grammars(CompilingRequest(new, requests, pending, self.clock.now()))

    def _check_scope(self, meta: RequestMeta) -> None:
        if "\0" in meta.cache_salt:
            raise InvalidRequestError("cache_salt contains NUL", "cache_salt")
        if meta.adapter is not None:
            self._check_adapter(meta.adapter)

    def _queue(self, requests: list[Request], pending: PendingGuide | None) -> None:
        """Add sequences to the scheduler, all or none."""
        queued: list[Request] = []
        try:
            for request in requests:
                self.scheduler.add(request)
                queued.append(request)
            if pending is not None:
                self.guided.open([request.request_id for request in requests], pending)
                self._replay(requests)
        except InvalidRequestError:
            for request in queued:
                self.scheduler.abort(request.request_id, self.clock.now())
            raise

    def _replay(self, requests: list[Request]) -> None:
        """Advance the guides of resumed sequences over their earlier output."""
        self._ended += self._end(self.guided.replay((r.request_id, r.tokens[r.prompt_len :]) for r in requests))

    def _await_grammars(self, new: CompilingRequest) -> None:
        """Set a request aside until its grammars are compiled."""
        for request in new.requests:
            self.scheduler.check_fits(request)
            if compiling.contains(self._compiling, request.request_id):
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        self._compiling.append(new)

    def _check_logprobs(self, params: SequenceParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None and not self.runner.capabilities.logprobs:
                raise InvalidRequestError(f"{name}: not supported by a priced engine, which has no model", name)

    def _check_adapter(self, adapter: Adapter) -> None:
        if self.scheduler.adapters is None:
            raise InvalidRequestError(NO_ADAPTERS, "model")
        max_rank = self.scheduler.adapters.pool.max_rank
        if adapter.rank > max_rank:
            problem = f"has rank {adapter.rank}, above the maximum of {max_rank}: raise --lora-max-rank"
            raise InvalidRequestError(f"LoRA adapter {adapter.name!r} {problem}", "model")

    def _check_vocabulary(self, name: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {self.vocab_size}", name)

    def _make_requests(self, new: Add) -> list[Request]:
        """Return the sequences of the samples that have not ended."""
        now_s = self.clock.now()
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
            request.waited, request.pools_prompt = waited, self._pools_prompt
            if said is not None:
                request.resume(said.token_ids, said.ttft_s)
            made.append(request)
        return made

    def _outputs_of(self, new: Add) -> list[PriorOutput | None]:
        """Return the output of each sample on other engines; empty for a new request."""
        if new.outputs is None:
            return []
        if len(new.outputs) != new.n or not any(new.outputs):
            raise InvalidRequestError(f"outputs: expected {new.n} entries, one of them open", "outputs")
        for said in new.outputs:
            self._check_vocabulary("outputs", said.token_ids if said else ())
        return new.outputs

    def _make_request(self, new: Add, index: int, seed: int) -> Request:
        prompt, params = new.prompt, new.prompt.params
        if index and params.prompt_logprobs is not None:
            # Sample 0 reports them for all.
            prompt = replace(prompt, params=replace(params, prompt_logprobs=None))
        stop_ids = frozenset(params.stop_token_ids)
        return Request(
            sequence_id(new.request_id, index),
            prompt,
            seed=wrap_int64(seed + index),
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_ids,
            fork_of=sequence_id(new.request_id, 0) if index else None,
        )

    def abort(self, sequence_ids: list[str]) -> None:
        """End requests; the next `step` reports them. Unknown ids are ignored, because aborts race with ends."""
        now = self.clock.now()
        for request_id in sequence_ids:
            ended = self.scheduler.abort(request_id, now)
            if ended is None and self._compiling:
                ended = compiling.abort(self._compiling, request_id, now)
            if ended is not None:
                self._ended += self._with_guide_ends([ended])

    @property
    def busy(self) -> bool:
        """True if `step` has something to do."""
        reading = self.adapters is not None and self.adapters.pending
        return bool(self._in_flight or self._ended or self._compiling or self.scheduler.has_work or reading)

    @property
    def idle_turn(self) -> bool:
        """True if the last `step` planned, completed and reported nothing although the engine is busy.

        The caller then waits `IDLE_TURN_WAIT_S`, or for a message, to avoid a busy loop.
        """
        return self._is_idle_turn and self.busy

    def step(self) -> list[SequenceOutput]:
        """Run one turn: `launch` and `settle`."""
        return self.launch() + self.settle()

    def launch(self) -> list[SequenceOutput]:
        """Run the first half of a turn: plan and submit the next step, without waiting for a running one.

        Return all output so far: ends that the plan decided, earlier aborts, expired requests whose grammars were being
        compiled, and results of committed steps. A step that verifies drafts is committed before the next one is
        planned. Otherwise its requests would skip every other step, and alternating groups read the weights twice as
        often. Every step is, if the next one may verify drafts: they are guessed from known tokens.
        """
        outputs, self._ended = self._ended, []
        self.guided.mask_s = 0.0
        if self._compiling:
            outputs += self._release_compiled()
        while self._in_flight and (self._in_flight[-1].plan.num_drafts or self.scheduler.wants_known_tokens):
            outputs += self._commit_oldest()
        with self._span("plan"):
            plan = self.scheduler.plan(self.clock.now())
        self._fresh.clear()
        outputs += self._with_guide_ends(self.scheduler.take_ended())
        self._planned = plan is not None
        if plan is not None:
            self._submit(plan)
        self.scheduler.catch_up()
        self._is_idle_turn = plan is None and not self._in_flight and not outputs
        return outputs

    def _submit(self, plan: StepPlan) -> None:
        assert not plan.num_drafts or self.runner.capabilities.drafts, "the runner verifies no drafts"
        self._in_flight.append(_InFlight(plan, None, False))  # before the call, so that `suspects` covers a failure
        handle = self.runner.submit(plan)
        if not plan.guided:
            self.runner.sample(handle, None)
        self._in_flight[-1] = _InFlight(plan, handle, not plan.guided)

    def settle(self) -> list[SequenceOutput]:
        """Run the second half: commit the oldest step if `depth` steps are in flight or nothing was planned.

        A step may be launched before the tokens are known that its masks depend on. While it runs, the step that
        samples them is committed and the masks are made.
        """
        outputs: list[SequenceOutput] = []
        if self._in_flight and not self._in_flight[-1].sampled:
            outputs += self._sample_guided()
        if self._in_flight and not (self._planned and len(self._in_flight) < self.depth):
            outputs += self._commit_oldest()
        if self._is_idle_turn and self._compiling:
            self.guided.wait(IDLE_TURN_WAIT_S)
            self._is_idle_turn = False
        if self._step_end is not None:
            self._step_end.flush()
        return outputs

    def _sample_guided(self) -> list[SequenceOutput]:
        """Make the masks of the newest step, and launch its sampling."""
        newest = self._in_flight.pop()
        try:
            outputs = self._see_last_tokens(newest.plan)
            masks, ends = self.guided.masks(newest.plan, self.runner.mask_space)
            outputs += self._end(ends)
            self.runner.sample(newest.handle, masks)
        finally:
            self._in_flight.append(newest._replace(sampled=True))
        return outputs

    def _commit_oldest(self) -> list[SequenceOutput]:
        """Wait for the oldest step in flight and commit it."""
        oldest = self._in_flight[0]
        result = self.runner.collect(oldest.handle)
        self._in_flight.popleft()
        with self._span("commit"):
            if oldest.plan.num_drafts and oldest.plan.guided:
                self.guided.trim(oldest.plan, result)
            outputs = self.scheduler.commit(oldest.plan, result, self.clock.now())
        return self._with_guide_ends(outputs)

    # --- guides -------------------------------------------------------------------------------------------------
    def _release_compiled(self) -> list[SequenceOutput]:
        """Queue requests whose grammars are compiled, and end late ones of the others."""
        for ready in compiling.take_ready(self._compiling, self.clock.now()):
            self._fresh.append(ready.new)
            try:
                self._queue(ready.requests, ready.pending)
            except InvalidRequestError as error:
                self._invalid.append((ready.new, error))
        return compiling.expire(self._compiling, self.clock.now())

    def take_invalid(self) -> list[InvalidAdd]:
        """Return requests that turned out to be invalid since the last call. They have no other output."""
        invalid, self._invalid = self._invalid, []
        return invalid

    def _see_last_tokens(self, plan: StepPlan) -> list[SequenceOutput]:
        """Commit the steps in flight that sample for the guided rows of `plan`, which is launched but not sampled."""
        outputs: list[SequenceOutput] = []
        if self._in_flight:
            while any(self.guided.depends_on(plan, _guided_names(step.plan)) for step in self._in_flight):
                outputs += self._commit_oldest()
        return outputs

    def _with_guide_ends(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Return the outputs, and the ends that guides decide after them."""
        if not self.guided.live:
            return outputs
        return outputs + self._end(self.guided.advance(outputs))

    def _end(self, ends: list[GuideEnd]) -> list[SequenceOutput]:
        """End sequences as their guides decide."""
        now = self.clock.now() if ends else 0.0
        outputs = []
        for end in ends:
            reason = FinishReason.STOP if end.error is None else FinishReason.ERROR
            outputs.append(self.scheduler.finish(end.sequence_id, reason, now, end.error))
        self.guided.close(end.sequence_id for end in ends)
        return [output for output in outputs if output is not None]

    # --- looking in ---------------------------------------------------------------------------------------------
    def promise(self, now_s: float) -> Promise:
        """Return the engine's promise after `launch`. `now_s`: when the step began."""
        promise, adapters = self.scheduler.promise(now_s), self.scheduler.adapters
        return promise if adapters is None else adapters.publish(promise)

    def suspects(self) -> list[str]:
        """Return the sequences that may have caused a failure.

        These are the ones added since the last plan; else those that took a seat in the steps in flight; else all of
        these steps.
        """
        if self._fresh:
            return [sequence_id(new.request_id, index) for new in self._fresh for index in range(new.n)]
        plans = [step.plan for step in self._in_flight]
        began = [new.request_id for plan in plans for new in plan.admitted]
        return began or list(dict.fromkeys(row.request_id for plan in plans for row in plan.rows))

    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        if self.guided.used:
            stats = stats._replace(guides=self.guided.stats()._replace(waiting=len(self._compiling)))
        return stats

    def close(self) -> None:
        if self.guided.guides is not None:
            self.guided.guides.close()
        if self._step_end is not None:
            self._step_end.close()
        self.runner.close()


def _guided_names(plan: StepPlan) -> set[str]:
    return {plan.rows[row].request_id for row in plan.guided}
