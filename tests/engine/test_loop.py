"""Loop of the engine on scripted messages: recipients of each message, and the end of the loop."""

import gc
from dataclasses import replace
from itertools import count, pairwise

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.garbage import MAX_COLLECTION_INTERVAL_S, IdleGarbageCollector
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import FinishReason, SequenceOutput
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import IDLE_TURN_WAIT_S, EngineCore
from roseinfer.engine.loop import HEARTBEAT_S, PROMISE_INTERVAL_PER_WAITING_S, EngineLoop
from roseinfer.engine.messages import (
    OWNER,
    Abort,
    Add,
    ClientMessage,
    Disconnected,
    DrainEngine,
    EngineMessage,
    Failed,
    Heartbeat,
    Invalid,
    Outputs,
    PriorOutput,
    Received,
    Shutdown,
    UndrainEngine,
)
from tests.helpers.engines import make_core
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.guides import ArithmeticGuides

BLOCKS, BLOCK_SIZE = 64, 4


class Script:
    """Inbox that returns one batch of messages per turn, and outbox that records messages with their turn.

    After the last batch the loop runs until the engine is idle, and is then shut down.
    """

    def __init__(self, core: EngineCore, clock: ManualClock, *batches: list[Received], turn_s: float = 0.001) -> None:
        self.core = core
        self._turn_s = turn_s
        self._clock = clock
        self._batches = list(batches)
        self.turn = 0
        self.sent: list[tuple[int, int, EngineMessage]] = []  # turn, client, message

    def receive(self, timeout_s: float) -> list[Received]:
        self.turn += 1
        self._clock.advance(max(timeout_s, self._turn_s))
        if self._batches:
            return self._batches.pop(0)
        return [] if self.core.busy else [(OWNER, Shutdown())]

    def send(self, client: int, message: EngineMessage) -> None:
        self.sent.append((self.turn, client, message))

    def greet(self, message: EngineMessage, change: EngineMessage | None = None) -> None:
        self.broadcast(change or message)

    def broadcast(self, message: EngineMessage, exclude: int | None = None) -> None:
        for client in (0, 1, 2):
            if client != exclude:
                self.send(client, message)

    def outputs(self, client: int) -> list[Outputs]:
        return [message for _, who, message in self.sent if who == client and isinstance(message, Outputs)]

    def tokens(self, client: int) -> dict[str, int]:
        """Return the number of tokens of each sequence that was sent to the client."""
        counts: dict[str, int] = {}
        for message in self.outputs(client):
            for output in message.outputs:
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
        return counts


def add(name: str, tokens: int = 6, n: int = 1) -> Add:
    return Add(name, Prompt([5, 6, 7], SequenceParams(max_tokens=tokens, ignore_eos=True, seed=1)), n)


def play(
    *batches: list[tuple[int, ClientMessage | Disconnected]], core: EngineCore | None = None, turn_s: float = 0.001
) -> Script:
    core = core or make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    clock = ManualClock()
    script = Script(core, clock, *map(list, batches), turn_s=turn_s)
    EngineLoop(core, script, script, clock).run()
    return script


@pytest.mark.parametrize("depth", [1, 2])
def test_each_client_gets_one_message_per_step_with_its_own_outputs(depth: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, depth=depth)
    script = play([(1, add("a")), (2, add("b", n=2)), (1, add("c"))], [(2, add("d", 3))], core=core)
    assert script.tokens(1) == {"a:0": 6, "c:0": 6}
    assert script.tokens(2) == {"b:0": 6, "b:1": 6, "d:0": 3}
    assert script.tokens(OWNER) == {}
    places = [(turn, client) for turn, client, message in script.sent if isinstance(message, Outputs)]
    assert len(places) == len(set(places)), "a client was sent two messages in one step"
    assert all(message.outputs for client in (1, 2) for message in script.outputs(client))


def test_a_single_client_needs_no_sorting_and_a_second_one_may_come_later() -> None:
    script = play([(1, add("a", 8))], [], [], [(2, add("b", 2))])
    assert script.tokens(1) == {"a:0": 8}
    assert script.tokens(2) == {"b:0": 2}


@pytest.mark.parametrize("asker", [OWNER, 1])
def test_the_owner_gets_each_step_record_once(asker: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    script = play([(asker, add("a", 20))], *[[]] * 30, core=core)
    told = dict.fromkeys((0, 1, 2), 0)
    for _, client, message in script.sent:
        if isinstance(message, Outputs | Heartbeat):
            told[client] += len(message.steps)
    steps = core.stats().step
    # Steps after the last heartbeat are not reported.
    assert told[1] == told[2] == 0 and 0 < told[OWNER] <= steps
    if asker == OWNER:
        assert told[OWNER] == steps
        records = [record for message in script.outputs(OWNER) for record in message.steps]
        assert [record.tokens for record in records] == [3] + [1] * 19


def test_the_owner_gets_step_records_before_another_client_gets_an_end() -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    script = play([(1, add("a", 4)), (2, add("b", 9))], core=core)
    for client, tokens in ((1, 8), (2, 13)):
        ends = [i for i, (_, who, m) in enumerate(script.sent) if who == client and isinstance(m, Outputs) and _last(m)]
        before = [m for _, who, m in script.sent[: ends[0]] if who == OWNER and isinstance(m, Heartbeat)]
        assert before[-1].stats.generation_tokens == tokens
    told = [m.steps for _, who, m in script.sent if who == OWNER and isinstance(m, Heartbeat)]
    assert sum(map(len, told)) == core.stats().steps_done


def _last(message: Outputs) -> bool:
    return any(output.end is not None for output in message.outputs)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_is_recorded_when_it_is_done(depth: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, depth=depth)
    script = play([(OWNER, add("a", 20))], [], [], core=core)
    told = [message.steps for message in script.outputs(OWNER)]
    assert [record.tokens for records in told for record in records][:20] == [3] + [1] * 19
    assert all(len(records) == 1 for records in told), "with its outputs, neither earlier nor later"


@pytest.mark.parametrize(("policy", "predicts"), [("scorpio", True), ("fifo", False)])
def test_a_step_record_has_the_predicted_duration(policy: str, predicts: bool) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=TimedRunner(0.5), scheduling_policy=policy)
    script = play([(OWNER, add("a", 5))], core=core)
    records = [record for message in script.outputs(OWNER) for record in message.steps]
    assert [record.duration_s for record in records] == [0.5] * 5
    assert [record.predicted_s > 0 for record in records] == [predicts] * 5
    if predicts:
        assert abs(records[-1].predicted_s - 0.5) < abs(records[0].predicted_s - 0.5), "the model learns"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_record_has_rows_and_prompt_tokens(depth: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, depth=depth, max_num_batched_tokens=4)
    script = play([(OWNER, add("a", 4)), (OWNER, add("b", 4))], core=core)
    records = [record for message in script.outputs(OWNER) for record in message.steps]
    assert [(record.rows, record.prompt_tokens) for record in records][:3] == [(2, 4), (2, 2), (2, 0)]
    assert all(record.tokens == record.rows for record in records if not record.prompt_tokens)
    assert sum(record.prompt_tokens for record in records) == 6


class NotedPlans(EngineCore):
    """Policy wrapper with the `budgets` of each plan."""

    budgets: list[float | None]

    def launch(self) -> list[SequenceOutput]:
        outputs = super().launch()
        stats = self.stats()
        if stats.step > len(self.budgets):
            self.budgets.append(stats.policy and stats.policy.step_budget_s)
        return outputs


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_record_has_the_budget_that_it_was_planned_with(depth: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, depth=depth, engine=NotedPlans)
    assert isinstance(core, NotedPlans)
    core.budgets = []
    promised = add("a", 12)
    promised.prompt = replace(promised.prompt, meta=RequestMeta(slo=Slo(tpot_s=0.5)))
    script = play([(OWNER, promised)], core=core)
    budgets = [record.budget_s for message in script.outputs(OWNER) for record in message.steps]
    urgent = [(told, noted) for told, noted in zip(budgets, core.budgets, strict=False) if noted is not None]
    assert len(urgent) >= 9 and len(set(urgent)) > 5, "budgets change from step to step"
    assert all(told == noted for told, noted in urgent[:-1])


def test_a_policy_without_objectives_has_no_budget() -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, scheduling_policy="fifo")
    script = play([(OWNER, add("a", 5))], core=core)
    assert {record.budget_s for message in script.outputs(OWNER) for record in message.steps} == {None}


def test_all_clients_get_heartbeats_also_of_a_busy_engine() -> None:
    script = play([(1, add("a", 40))], turn_s=0.1)
    for client in (0, 1, 2):
        beats = [m.now_s for _, who, m in script.sent if who == client and isinstance(m, Heartbeat)]
        assert len(beats) >= 4 / HEARTBEAT_S
        assert all(later - earlier < HEARTBEAT_S + 0.2 for earlier, later in pairwise(beats))


def test_idle_turns_do_not_make_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy plans nothing in its first turns; the loop waits for messages between them."""
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    plan, asked, waits = core.scheduler.plan, count(1), list[float]()
    monkeypatch.setattr(core.scheduler, "plan", lambda now_s: None if next(asked) <= 4 else plan(now_s))
    receive = Script.receive
    monkeypatch.setattr(Script, "receive", lambda script, wait: (waits.append(wait), receive(script, wait))[1])
    script = play([(1, add("a"))], core=core)
    assert script.tokens(1) == {"a:0": 6}
    assert waits[1:6] == [IDLE_TURN_WAIT_S] * 4 + [0.0], "the first wait is for work"


def test_requests_of_a_client_end_when_it_disconnects() -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    script = play([(1, add("a", 50, n=2)), (2, add("b", 10))], [], [], [(1, Disconnected())], core=core)
    assert 0 < script.tokens(1)["a:0"] < 10
    assert script.tokens(2) == {"b:0": 10}
    assert core.scheduler.num_live == 0


def test_the_engine_ends_with_its_owner() -> None:
    script = play([(1, add("a", 50))], [], [(OWNER, Disconnected())], [(1, add("b"))])
    assert script.turn == 3
    assert core_closed(script)


class TimedRunner(FakeRunner):
    """Runner whose steps report a duration of `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE)
        self._seconds = seconds

    def collect(self, handle: int) -> StepResult:
        return replace(super().collect(handle), duration_s=self._seconds)


def core_closed(script: Script) -> bool:
    runner = script.core.runner
    assert isinstance(runner, FakeRunner)
    return runner.closed


def test_only_the_owner_may_shut_it_down() -> None:
    script = play([(1, Shutdown()), (1, add("a", 5))])
    assert script.tokens(1) == {"a:0": 5}
    assert core_closed(script)


def test_rejections_and_aborts_reach_their_client() -> None:
    unreadable = Invalid("x", "invalid request", None, None)
    same_id, abort = add("a"), Abort(["b:0"])
    script = play([(1, add("a")), (2, same_id), (2, add("b", 50)), (2, unreadable)], [], [], [(2, abort)])
    rejected = [(client, m.request_id) for _, client, m in script.sent if isinstance(m, Invalid)]
    assert rejected == [(2, "a"), (2, "x")]
    assert script.tokens(1) == {"a:0": 6}, "who had the id first keeps it"
    ends = [o.end.reason for m in script.outputs(2) for o in m.outputs if o.end is not None]
    assert ends == [FinishReason.ABORT]


class OutOfMemoryError(RuntimeError):
    """Error with the name of torch's."""


class FailingRunner(FakeRunner):
    """Runner that fails at the fourth step, at its launch or when it is awaited."""

    def __init__(self, where: str) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE)
        self._where = where

    def submit(self, plan: StepPlan) -> int:
        self._maybe_fail("submit", plan.step)
        return super().submit(plan)

    def sample(self, handle: int, masks: TokenMasks | None = None) -> None:
        self._maybe_fail("sample", handle)
        super().sample(handle, masks)

    def collect(self, handle: int) -> StepResult:
        self._maybe_fail("collect", handle)
        return super().collect(handle)

    def _maybe_fail(self, where: str, step: int) -> None:
        if where == self._where and step == 3:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["submit", "sample", "collect"])
def test_a_failure_of_the_accelerator_is_sent_to_all_clients_and_ends_the_loop(where: str, depth: int) -> None:
    runner = FailingRunner(where)
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=runner, depth=depth)
    script = play([(1, add("a", 50)), (2, add("b", 50))], core=core)
    failed = {client: m.message for _, client, m in script.sent if isinstance(m, Failed)}
    assert set(failed) == {0, 1, 2}
    assert set(failed.values()) == {"OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert runner.closed


def test_an_accelerator_that_fails_again_on_close_is_reported_once() -> None:
    """Closing waits for copies in flight, which fails too."""
    runner = FailingRunner("collect")
    runner.close = lambda: runner.collect(3)
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=runner)
    script = Script(core, clock := ManualClock(), [(1, add("a", 50))], turn_s=0.001)
    assert EngineLoop(core, script, script, clock).run() is False
    assert [client for _, client, m in script.sent if isinstance(m, Failed)] == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["submit", "sample", "collect"])
def test_a_failure_names_the_requests_that_started_in_the_step(where: str, depth: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=FailingRunner(where), depth=depth)
    script = play([(1, add("a", 50)), (2, add("b", 50))], [], [], [(2, add("new", 50, n=2))], core=core)
    named = [m.suspects for _, _, m in script.sent if isinstance(m, Failed)]
    assert named == [["new:0"]] * 3, "its sample 1 waits for the prompt, and the others went well before"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failure_of_a_step_without_new_requests_names_all_of_its_requests(depth: int) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=FailingRunner("collect"), depth=depth)
    script = play([(1, add("a", 50)), (2, add("b", 50))], core=core)
    assert [set(m.suspects) for _, _, m in script.sent if isinstance(m, Failed)] == [{"a:0", "b:0"}] * 3


def test_a_failure_to_plan_names_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    plan = core.scheduler.plan

    def brittle(now_s: float) -> StepPlan | None:
        assert core.scheduler.num_live < 2, "planted"
        return plan(now_s)

    monkeypatch.setattr(core.scheduler, "plan", brittle)
    script = play([(1, add("a", 50)), (1, add("a"))], [(1, Abort(["x"]))], [(2, add("b", n=2))], core=core)
    assert [m.suspects for _, _, m in script.sent if isinstance(m, Failed)] == [["b:0", "b:1"]] * 3


class Ordered(FakeRunner):
    """Runner that records in a shared list when it is awaited."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE)
        self.events: list[object] = []

    def collect(self, handle: int) -> StepResult:
        self.events.append(f"collect {handle}")
        return super().collect(handle)


@pytest.mark.parametrize("guide", [None, "1,50,2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_rejections_are_sent_before_the_step_is_awaited(
    depth: int, guide: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Ordered()
    events = runner.events
    core = make_core(
        num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=runner, depth=depth, guides=ArithmeticGuides(vocab_size=50)
    )
    send = Script.send

    def noted(script: Script, client: int, message: EngineMessage) -> None:
        if isinstance(message, Outputs):
            events.extend((client, output.end.reason) for output in message.outputs if output.end is not None)
        send(script, client, message)

    monkeypatch.setattr(Script, "send", noted)
    working = add("a", 20)
    if guide is not None:
        working.prompt = replace(working.prompt, guide=GuideSpec(grammar=guide))
    late = add("late")
    late.prompt = replace(late.prompt, meta=RequestMeta(deadline_s=0.0))
    clock = ManualClock()
    script = Script(core, clock, [(1, working)], [], [(2, late), (3, add("b"))], [(3, Abort(["b:0"]))])
    promises: list[Promise] = []

    def publish(promise: Promise) -> None:
        promises.append(promise)
        events.append("promise")

    EngineLoop(core, script, script, clock, publish=publish).run()
    for told in ((2, FinishReason.TIMEOUT), (3, FinishReason.ABORT)):
        behind = events[events.index(told) :]
        waits = [event for event in behind if event == "promise" or str(event).startswith("collect")]
        assert waits[:2] == ["promise", waits[1]] and str(waits[1]).startswith("collect")
    assert {promise.running for promise in promises} >= {1, 2}
    assert (promises[-1].running, promises[-1].waiting, promises[-1].free_seats) == (0, 0, 8)
    assert [promise.steps for promise in promises] == sorted(promise.steps for promise in promises)


def test_an_idle_engine_promises_with_its_heartbeats_and_drains_on_request_of_its_owner() -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    clock, promises = ManualClock(), list[Promise]()
    idle: list[list[Received]] = [[] for _ in range(4)]
    asked: list[list[Received]] = [
        [(1, DrainEngine()), (1, UndrainEngine())],
        [(OWNER, DrainEngine())],
        [(1, add("a", 2))],
        [],
        [],
    ]
    script = Script(core, clock, *idle, *asked, [(OWNER, UndrainEngine())])
    EngineLoop(core, script, script, clock, publish=promises.append).run()
    assert [promise.at_s for promise in promises[:2]] == [HEARTBEAT_S, 2 * HEARTBEAT_S]
    said = [(promise.draining, promise.running) for promise in promises]
    distinct = [now for before, now in pairwise([None, *said]) if now != before]
    assert distinct == [(False, 0), (True, 0), (True, 1), (True, 0), (False, 0)], "its owner's word alone counts"
    assert script.tokens(1) == {"a:0": 2}, "what comes all the same is served"


class Slow(FakeRunner):
    """Runner whose steps take a second."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE)
        self._clock = clock

    def collect(self, handle: StepPlan) -> StepResult:
        self._clock.advance(1.0)
        return super().collect(handle)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_time_of_a_promise_is_when_messages_were_read(depth: int) -> None:
    """A router would otherwise count requests that were sent during the step as part of the promise."""
    clock, promises, read_s = ManualClock(), list[Promise](), list[float]()
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=Slow(clock), depth=depth)
    script = Script(core, clock, [(1, add("a", 3))])

    class Noted(Script):
        def receive(self, timeout_s: float) -> list[Received]:
            received = script.receive(timeout_s)
            read_s.append(clock.now())
            return received

    EngineLoop(core, Noted(core, clock), script, clock, publish=promises.append).run()
    assert promises[-1].running == 0 and {promise.at_s for promise in promises} <= set(read_s)


def test_with_a_long_queue_promises_are_less_frequent() -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    clock, promises, queue = ManualClock(), list[Promise](), [(1, add(f"w{i}", 3)) for i in range(1000)]
    script = Script(core, clock, [(1, add("a"))], [], [], queue, [])
    EngineLoop(core, script, script, clock, publish=promises.append).run()
    steps = promises[-1].steps
    assert (promises[-1].running, promises[-1].waiting) == (0, 0)
    few = [promise for promise in promises if promise.waiting < 0.001 / PROMISE_INTERVAL_PER_WAITING_S]
    assert [promise.steps for promise in few[:3]] == [1, 2, 3], "every step's"
    for before, now in pairwise(promises):
        assert now.at_s - before.at_s >= PROMISE_INTERVAL_PER_WAITING_S * before.waiting or not now.running
    assert len(promises) < steps / 2


@pytest.fixture
def own_collector() -> object:
    """Restore the interpreter's garbage collector after the test."""
    yield
    gc.unfreeze()
    gc.enable()


class Counted(IdleGarbageCollector):
    collections = 0

    def collect(self) -> None:
        super().collect()
        self.collections += 1


def test_garbage_is_collected_when_idle_and_sometimes_under_load(own_collector: object) -> None:
    clock = ManualClock()
    before, loaded = gc.get_freeze_count(), [[] for _ in range(1000)]
    duty = Counted(clock)
    assert not gc.isenabled() and gc.get_freeze_count() >= before + len(loaded), "what is there already stays"
    duty.idle()
    assert duty.collections == 0, "nothing has happened yet"
    for _ in range(10):
        duty.busy()
        clock.advance(MAX_COLLECTION_INTERVAL_S / 12)
    assert duty.collections == 0
    duty.idle()
    duty.idle()
    assert duty.collections == 1
    clock.advance(MAX_COLLECTION_INTERVAL_S)
    duty.busy()
    assert duty.collections == 2


def test_the_loop_collects_garbage_when_idle(own_collector: object) -> None:
    clock = ManualClock()
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    script = Script(core, clock, [(OWNER, add("a", 3))], [], [], [], [], [])
    duty = Counted(clock)
    EngineLoop(core, script, script, clock, duty).run()
    assert duty.collections == 1


def test_the_loop_forgets_a_resumed_request_when_its_last_samples_end() -> None:
    core = make_core(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    going_on = add("a", 6, n=3)
    going_on.outputs = [None, PriorOutput([7, 8], 0.5), PriorOutput([], 0.0)]
    clock = ManualClock()
    script = Script(core, clock, [(1, going_on), (2, add("b"))])
    loop = EngineLoop(core, script, script, clock)
    loop.run()
    assert script.tokens(1) == {"a:1": 4, "a:2": 6}
    assert not loop._client_of
