"""Reported waits and steps of sequences."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from roseinfer.core.guide import GuideSpec
from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Forecast, Rejection, Slo, Why
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add, PriorOutput
from roseinfer.sched.policies.common.planned import PlannedDecision
from roseinfer.sched.policy import Decision, Event, RejectedRequest, View
from tests.helpers.engines import Collected, add, gather, make_core, run_dry
from tests.helpers.guides import ArithmeticBlueprint, ArithmeticGuides

STEP_S = 1.0


def turn(core: EngineCore, done: dict[str, Collected]) -> None:
    """One step, which takes a second."""
    gather(core.launch(), done)
    core.clock.advance(STEP_S)
    gather(core.settle(), done)


def run(core: EngineCore, turns: int = 100) -> dict[str, Why]:
    done: dict[str, Collected] = {}
    for _ in range(turns):
        if core.busy:
            turn(core, done)
    assert not core.busy
    return {name.removesuffix(":0"): why_of(each) for name, each in done.items()}


def why_of(each: Collected) -> Why:
    assert each.end is not None and each.end.why is not None
    return each.end.why


def fill(core: EngineCore, name: str, prompt: int, output: int, **more: Any) -> None:
    add(core, name, [1] * prompt, max_tokens=output, ignore_eos=True, **more)


# --- what the mechanism sees ------------------------------------------------------------------------------------
def test_one_that_comes_within_a_step_waits_for_its_end_and_then_runs() -> None:
    core, done = make_core(), {}
    fill(core, "a", 4, 3)
    gather(core.launch(), done)
    core.clock.advance(0.25)
    fill(core, "b", 4, 2)
    core.clock.advance(0.75)
    gather(core.settle(), done)
    whys = run(core)
    assert whys["a"] == Why((), chunks=1, steps=3, prefill_s=1.0)
    assert whys["b"] == Why(((Cause.STEP, 0.75),), chunks=1, steps=2, prefill_s=1.0)


def test_one_that_comes_while_nothing_runs_is_on_its_way_until_it_starts() -> None:
    core = make_core()
    fill(core, "a", 4, 1)
    run(core)
    core.clock.advance(1.0)
    sent_s = core.clock.now()
    core.clock.advance(0.25)
    core.add(Add("b", Prompt([1, 2], SequenceParams(max_tokens=1)), age_s=0.5, sent_s=sent_s))
    core.clock.advance(0.25)
    assert run(core)["b"].waited == ((Cause.TRANSIT, 1.0),)


def test_what_a_message_waited_to_be_read_was_for_the_step_that_ran() -> None:
    core, done = make_core(), {}
    fill(core, "a", 4, 3)
    turn(core, done)
    late = core.clock.now() - 0.5
    core.add(Add("b", Prompt([1, 2], SequenceParams(max_tokens=1)), age_s=0.25, sent_s=late))
    core.add(Add("c", Prompt([1, 2], SequenceParams(max_tokens=1), RequestMeta(arrival_s=late))))
    whys = run(core)
    assert whys["b"].waited == ((Cause.STEP, 0.5), (Cause.TRANSIT, 0.25))
    assert whys["c"].waited == ((Cause.STEP, 0.5),)


def test_it_is_said_with_the_first_token_and_with_the_end() -> None:
    core = make_core(max_num_seqs=1)
    fill(core, "a", 2, 3)
    fill(core, "b", 2, 2)
    whys = []
    while core.busy:
        for output in core.launch() + core.settle():
            whys += [output.started.why] if output.started else []
            whys += [output.end.why] if output.end else []
        core.clock.advance(STEP_S)
    waited = ((Cause.SEATS, 3.0),)
    assert whys == [
        Why((), chunks=1, steps=1),
        Why((), chunks=1, steps=3),
        *[Why(waited, Forecast(), 1, n) for n in (1, 2)],
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_seats(depth: int) -> None:
    core = make_core(max_num_seqs=1, depth=depth)
    for name in "abc":
        fill(core, name, 2, 2)
    whys = run(core)
    assert [set(dict(whys[name].waited)) for name in "abc"] == [set(), {Cause.SEATS}, {Cause.SEATS}]
    assert all(why.sat_out == 0 for why in whys.values())


def test_blocks() -> None:
    core = make_core(num_blocks=4, block_size=2, prefix_caching=False)
    fill(core, "a", 6, 2)
    fill(core, "b", 4, 1)
    assert run(core)["b"].waited == ((Cause.BLOCKS, 2.0),)


def test_the_prompt_budget() -> None:
    core = make_core(max_num_batched_tokens=4, prefix_caching=False)
    fill(core, "long", 10, 1)
    fill(core, "next", 2, 1)
    whys = run(core)
    assert whys["long"] == Why((), chunks=3, steps=3, prefill_s=3.0)
    assert whys["next"].waited == ((Cause.BUDGET, 2.0),)


def test_a_whole_prompt_that_does_not_fit_waits_for_the_prompt_budget() -> None:
    core = make_core(max_num_batched_tokens=8, enable_chunked_prefill=False, prefix_caching=False)
    fill(core, "a", 6, 1)
    fill(core, "b", 6, 1)
    assert run(core)["b"].waited == ((Cause.BUDGET, 1.0),)


def test_one_that_yields_its_blocks_waits_for_blocks() -> None:
    core = make_core(num_blocks=6, block_size=2, prefix_caching=False)
    fill(core, "old", 4, 8)
    fill(core, "young", 4, 4)
    whys = run(core)
    assert whys["old"].waited == () and dict(whys["young"].waited).keys() == {Cause.BLOCKS}
    assert whys["young"].chunks == 2, "its prompt, and what it computed again"


def test_samples_wait_for_what_sample_0_waits_for_and_then_for_the_prompt() -> None:
    core = make_core(max_num_batched_tokens=8, max_num_seqs=3, prefix_caching=False)
    fill(core, "a", 2, 2)
    fill(core, "b", 2, 3)
    fill(core, "c", 2, 3)
    fill(core, "many", 8, 2, n=2)
    whys = run(core)
    first, second = whys["many"], whys["many:1"]
    assert dict(first.waited) == {Cause.SEATS: 2.0}
    assert dict(second.waited) == {Cause.SEATS: 2.0, Cause.PARENT: 2.0}
    assert second.chunks == 1


@pytest.mark.parametrize("policy", ["fifo", "slack", "scorpio", "qoserve"])
def test_samples_whose_sample_0_starts_at_once_wait_for_the_prompt_alone(policy: str) -> None:
    core = make_core(scheduling_policy=policy)
    fill(core, "many", 8, 2, n=3)
    whys = run(core)
    assert whys["many"].waited == ()
    assert whys["many:1"].waited == whys["many:2"].waited == ((Cause.PARENT, 1.0),)


def test_who_ends_before_its_start_says_so_too() -> None:
    core, done = make_core(max_num_seqs=1), {}
    fill(core, "a", 2, 9)
    core.add(Add("late", Prompt([1, 2], SequenceParams(max_tokens=2), RequestMeta(deadline_s=2.5))))
    fill(core, "gone", 2, 2)
    turn(core, done)
    core.clock.advance(0.5)
    core.abort(["gone:0"])
    while core.busy:
        turn(core, done)
    assert why_of(done["gone:0"]) == Why(((Cause.SEATS, 1.5),))
    assert why_of(done["late:0"]) == Why(((Cause.SEATS, 2.5),))


# --- before it came to the scheduler ----------------------------------------------------------------------------
def test_what_passed_in_another_engine() -> None:
    core = make_core(max_num_seqs=1)
    fill(core, "a", 2, 3)
    turn(core, {})
    params = SequenceParams(max_tokens=3, ignore_eos=True)
    core.add(Add("again", Prompt([1, 2], params), age_s=5.0, moved=True))
    core.add(Add("plain", Prompt([1, 2], params), age_s=5.0))
    core.add(Add("resumed", Prompt([1, 2], params), 2, age_s=7.0, outputs=[PriorOutput([4], 1.0), None]))
    whys = run(core)
    assert dict(whys["resumed"].waited) == {Cause.ENGINE: 7.0, Cause.SEATS: 2.0}
    assert dict(whys["again"].waited) == {Cause.ENGINE: 5.0, Cause.SEATS: 4.0}
    assert dict(whys["plain"].waited) == {Cause.TRANSIT: 5.0, Cause.SEATS: 7.0}


class SlowGuides(ArithmeticGuides):
    """Guides whose rules become ready when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[ArithmeticBlueprint] = []

    def prepare(self, spec: GuideSpec) -> ArithmeticBlueprint:
        self.pending.append(ArithmeticBlueprint(spec.grammar, self, ready=False))
        return self.pending[-1]

    def wait(self, timeout_s: float) -> None: ...


def test_its_grammar() -> None:
    guides, done = SlowGuides(), {}
    core = make_core(guides=guides, max_num_seqs=1)
    fill(core, "free", 2, 3)
    guided = Add("guided", Prompt([1, 2], SequenceParams(max_tokens=2), guide=GuideSpec(grammar="3,9")), age_s=0.5)
    core.add(guided)
    core.add(
        Add("gone", Prompt([1, 2], SequenceParams(max_tokens=2), guide=guided.prompt.guide), age_s=3.0, moved=True)
    )
    turn(core, done)
    core.abort(["gone:0"])
    turn(core, done)
    guides.pending[0].ready = True
    while core.busy:
        turn(core, done)
    assert dict(why_of(done["guided:0"]).waited) == {Cause.GRAMMAR: 2.0, Cause.SEATS: 1.0, Cause.TRANSIT: 0.5}
    assert why_of(done["gone:0"]) == Why(((Cause.ENGINE, 3.0), (Cause.GRAMMAR, 1.0)))


# --- steps ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_which_it_sat_out_are_counted(depth: int) -> None:
    core = make_core(depth=depth, max_batch_size=1)
    fill(core, "a", 2, 4)
    fill(core, "b", 2, 4)
    whys = run(core)
    assert sum(why.sat_out for why in whys.values()) == sum(why.steps for why in whys.values()) - 8 > 0


# --- what policies say ------------------------------------------------------------------------------------------
class Scripted:
    """Lets one request at a time run, the newest first, and says what `explain` says of those that wait."""

    def __init__(self, explain: Callable[[View], dict[str, Cause]], line: Cause = Cause.QUEUE) -> None:
        self._explain, self._line = explain, line
        self.asked: list[str] = []
        self.refuse: set[str] = set()

    def begin(self, view: View) -> Decision:
        waiting = list(view.waiting())
        starts = [] if view.running or not waiting else [waiting[-1]]
        refusals = [RejectedRequest(r, Rejection("ttft", 9.0)) for r in waiting if r.request_id in self.refuse]
        chunks = {request.request_id: 100 for request in [*view.running, *starts]}
        named = self._explain(view)
        explained = [(r, named[r.request_id]) for r in waiting if r.request_id in named]
        return ScriptedDecision(view.running, chunks, starts, refusals, explained, self._line)

    def observe(self, event: Event) -> None:
        pass

    def forecast(self, request: Request) -> Forecast:
        self.asked.append(request.request_id)
        return Forecast(len(self.asked) * 1.0)


class ScriptedDecision(PlannedDecision):
    def __init__(self, rows: Any, chunks: Any, starts: Any, refusals: Any, explained: Any, line: Cause) -> None:
        super().__init__(rows, chunks, starts, refusals)
        self._explained, self._line = explained, line

    def wait_causes(self) -> Iterable[tuple[Request, Cause]]:
        return self._explained

    def default_cause(self) -> Cause:
        return self._line


def scripted(policy: Scripted, **options: Any) -> EngineCore:
    core = make_core(**options)
    scheduler = core.scheduler
    made = type(scheduler)(scheduler.config, scheduler.kv, policy, scheduler.max_model_len, scheduler.limits)
    core.scheduler = made
    return core


def test_a_policy_names_some_and_the_others_wait_in_line() -> None:
    said = {0: {"a:0": Cause.TENANT}, 2: {"a:0": Cause.PRICE}}
    core = scripted(Scripted(lambda view: said.get(view.step, {})))
    for name in "abc":
        fill(core, name, 2, 3)
    whys = run(core)
    assert whys["c"].waited == () and whys["b"].waited == ((Cause.QUEUE, 3.0),)
    assert dict(whys["a"].waited) == {Cause.TENANT: 2.0, Cause.PRICE: 4.0}


def test_what_is_said_of_sample_0_holds_for_those_that_wait_for_it() -> None:
    core = scripted(Scripted(lambda view: {"a:0": Cause.TENANT}))
    fill(core, "a", 2, 2, n=2)
    fill(core, "b", 2, 3)
    whys = run(core)
    assert dict(whys["a"].waited) == {Cause.TENANT: 3.0}
    assert dict(whys["a:1"].waited)[Cause.TENANT] == 3.0


def test_what_a_policy_foresaw_is_asked_once() -> None:
    policy = Scripted(lambda view: {})
    core, done = scripted(policy), {}
    for name in "abc":
        fill(core, name, 2, 3)
    policy.refuse = {"a:0"}
    turn(core, done)
    core.abort(["b:0"])
    while core.busy:
        turn(core, done)
    assert sorted(policy.asked) == ["a:0", "b:0", "c:0"]
    assert sorted(why_of(each).forecast.ttft_s for each in done.values()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("broken", ["wait_causes", "default_cause", "forecast"])
def test_a_policy_that_cannot_explain_itself_stops_nothing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise KeyError("no such thing")

    monkeypatch.setattr(Scripted if broken == "forecast" else ScriptedDecision, broken, fail)
    core = scripted(Scripted(lambda view: {}))
    fill(core, "a", 2, 2)
    fill(core, "b", 2, 2)
    whys = run(core)
    assert core.scheduler.stats().policy_faults > 0 and len(whys) == 2
    assert sum(dict(whys["a"].waited).values()) == 2.0
    run_dry(core)


# --- what each policy says of those it does not start -----------------------------------------------------------
def first_line(core: EngineCore, name: str) -> Cause:
    """Return what a sequence waits for in its first second."""
    done: dict[str, Collected] = {}
    turn(core, done)
    core.abort([f"{name}:0"])
    while core.busy:
        turn(core, done)
    ((cause, seconds),) = why_of(done[f"{name}:0"]).waited
    assert seconds == STEP_S
    return cause


def promised(core: EngineCore, name: str, prompt: int, output: int, slo: Slo) -> None:
    params = SequenceParams(max_tokens=output, ignore_eos=True)
    core.add(Add(name, Prompt([len(name)] * prompt, params, RequestMeta(slo=slo))))


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"])
def test_every_policy_says_seats_where_seats_are_lacking(policy: str) -> None:
    core = make_core(scheduling_policy=policy, max_num_seqs=2)
    for name in ("a", "b", "c", "d"):
        fill(core, name, 2, 4)
    assert first_line(core, "d") is Cause.SEATS


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"])
def test_every_policy_says_blocks_where_blocks_are_lacking(policy: str) -> None:
    core = make_core(scheduling_policy=policy, num_blocks=4, block_size=4, prefix_caching=False)
    fill(core, "a", 12, 4)
    core.step()
    fill(core, "b", 8, 4)
    assert first_line(core, "b") is Cause.BLOCKS


@pytest.mark.parametrize(
    "options",
    [
        {"scheduling_policy": "fifo", "prefill_max_tokens": 8},
        {"scheduling_policy": "fifo", "prefill_max_batch_size": 1},
        {"scheduling_policy": "pack", "prefill_max_tokens": 8},
        {"scheduling_policy": "sarathi", "sarathi_token_budget": 8},
        {"scheduling_policy": "qoserve", "max_num_batched_tokens": 8},
        {"scheduling_policy": "scorpio", "max_num_batched_tokens": 8},
        {"scheduling_policy": "slack", "max_num_batched_tokens": 8},
    ],
)
def test_every_policy_says_so_where_the_prompt_budget_is_spent(options: dict[str, Any]) -> None:
    core = make_core(**options)
    fill(core, "a", 8, 2)
    fill(core, "b", 8, 2)
    assert first_line(core, "b") is Cause.BUDGET


@pytest.mark.parametrize("policy", ["qoserve", "scorpio"])
def test_those_that_run_leave_no_time(policy: str) -> None:
    """A fitted step takes some milliseconds, and the one that runs has as many for a token."""
    core = make_core(scheduling_policy=policy)
    done: dict[str, Collected] = {}
    promised(core, "a", 4, 30, Slo(tpot_s=1e-4))
    for _ in range(3):
        turn(core, done)
    promised(core, "bb", 12, 2, Slo(tpot_s=1e-4))
    assert first_line(core, "bb") is Cause.UTILISATION


def test_scorpio_tells_those_that_lack_tokens_from_those_behind_them() -> None:
    core = make_core(scheduling_policy="scorpio", max_num_seqs=2, max_num_batched_tokens=8)
    for name, prompt in (("a", 8), ("b", 8), ("c", 8)):
        fill(core, name, prompt, 3)
    whys = run(core)
    assert set(dict(whys["b"].waited)) == {Cause.BUDGET}
    assert set(dict(whys["c"].waited)) == {Cause.SEATS}


def test_pack_says_that_the_one_whose_turn_it_is_goes_first() -> None:
    core = make_core(scheduling_policy="pack", prefill_max_tokens=12, prefill_max_skips=1)
    done: dict[str, Collected] = {}
    fill(core, "long", 10, 2)
    fill(core, "short", 4, 2)
    turn(core, done)
    fill(core, "next", 1, 2)
    assert first_line(core, "next") is Cause.QUEUE
