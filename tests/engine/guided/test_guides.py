"""Outputs under guides: masks are computed between the launch of a step and its sampling."""

import itertools
import math
from array import array
from collections import Counter

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import CONSTRAINT_FAILED, CONSTRAINT_TOO_SLOW, InvalidRequestError
from roseinfer.core.guide import GuideSpec, Trigger
from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import Prompt, RequestMeta, request_id_of
from roseinfer.core.runner import Capabilities
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.guided.grammar_cache import GrammarGuideFactory
from roseinfer.engine.guided.guides import GuidedSequences
from roseinfer.engine.messages import Add
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.registry import make_policy, scheduler_config
from roseinfer.sched.scheduler import Scheduler
from tests.helpers.drafters import Oracle, Script
from tests.helpers.engines import Collected, add, assert_empty, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import DelayedRunner, FakeRunner
from tests.helpers.guides import Arithmetic, ArithmeticGuides, ToldClock, obeys
from tests.helpers.kv_managers import kv_manager
from tests.helpers.writing import TOKENS, VOCAB, grammar_guides

PROMPT = [5, 9, 2, 7, 11, 30, 8]


def guided_core(**options):
    return make_core(guides=ArithmeticGuides(), **options)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_guide_limits_the_output_and_ends_it(depth: int) -> None:
    free, core = make_core(), guided_core(depth=depth)
    for engine in (free, core):
        add(engine, "free", PROMPT, seed=2, ignore_eos=True, max_tokens=12)
    add(core, "a", PROMPT, guide="3,6", seed=1, ignore_eos=True, max_tokens=12)
    done = run_dry(core)
    tokens = done["a:0"].tokens
    assert len(tokens) == 6 and obeys(tokens, "3,6") and len(set(tokens)) > 1
    assert (done["a:0"].reason, done["a:0"].end.stop_token) == (FinishReason.STOP, None)
    assert done["free:0"].tokens == run_dry(free)["free:0"].tokens
    assert core.runner.masked == 6
    (guide,) = core.guided.guides.made
    assert guide.said == tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_the_same_at_both_depths_and_in_any_batch(depth: int) -> None:
    wanted = {}
    for i in range(3):
        alone = guided_core()
        add(alone, str(i), PROMPT, guide=f"{i + 2},9", seed=i)
        wanted |= {name: done.tokens for name, done in run_dry(alone).items()}
    core = guided_core(depth=depth, num_blocks=9, block_size=2, max_num_batched_tokens=5)
    for i in range(3):
        add(core, str(i), PROMPT, guide=f"{i + 2},9", seed=i)
    assert {name: done.tokens for name, done in run_dry(core).items()} == wanted
    assert core.stats().preemptions > 0


def test_a_step_is_launched_before_the_token_that_its_mask_depends_on_is_known() -> None:
    class Runner(DelayedRunner):
        def sample(self, handle, masks=None):
            self.log.append(f"sample {handle}")
            super().sample(handle, masks)

    runner = Runner(64, 4)
    core = guided_core(depth=2, runner=runner)
    add(core, "a", PROMPT, guide="3,3")
    run_dry(core)
    first = ["plan 0", "sample 0", "plan 1", "result 0", "sample 1", "plan 2", "result 1", "sample 2"]
    assert runner.log[:8] == first
    runner = Runner(64, 4)
    core = guided_core(depth=2, runner=runner)
    add(core, "b", PROMPT, max_tokens=3, ignore_eos=True)
    run_dry(core)
    assert runner.log[:5] == ["plan 0", "sample 0", "plan 1", "sample 1", "result 0"], "nobody is waited for"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dormant_guide_masks_nothing_and_still_follows(depth: int) -> None:
    core = guided_core(depth=depth)
    add(core, "a", PROMPT, guide="4,7,3", seed=1, ignore_eos=True)
    tokens = run_dry(core)["a:0"].tokens
    assert core.runner.masked == 4 and obeys(tokens, "4,7,3")
    plain = make_core()
    add(plain, "a", PROMPT, seed=1, ignore_eos=True, max_tokens=3)
    assert tokens[:3] == run_dry(plain)["a:0"].tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("late", [0, 1], ids=["advance", "fill"])
def test_an_error_of_a_guide_ends_only_its_sequence(depth: int, late: int) -> None:
    core = guided_core(depth=depth)
    add(core, "good", PROMPT, guide="3,6", seed=1)
    add(core, "bad", PROMPT, guide=f"3,9,0,2,{late}", seed=1)
    done = run_dry(core)
    assert done["bad:0"].reason is FinishReason.ERROR
    assert done["bad:0"].end.error.startswith(CONSTRAINT_FAILED)
    assert done["bad:0"].tokens == done["good:0"].tokens[:2] and len(done["good:0"].tokens) == 6
    assert not core.guided.live


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_between_two_steps_ends_the_guide(depth: int) -> None:
    core = guided_core(depth=depth, max_num_seqs=1)
    add(core, "a", PROMPT, guide="3,9", max_tokens=9)
    add(core, "b", PROMPT, guide="3,9", max_tokens=9)
    collected: dict[str, Collected] = {}
    for _ in range(3):
        gather(core.step(), collected)
    core.abort(["a:0", "b:0"])
    run_dry(core, collected)
    assert {done.reason for done in collected.values()} == {FinishReason.ABORT}
    assert not core.guided.live
    assert_empty(core)


def test_an_end_of_the_sequence_is_not_fed_to_the_guide() -> None:
    """A stop token that the guide allows ends the output as without a guide."""
    core = guided_core()
    add(core, "probe", PROMPT, guide="3,9", seed=1, max_tokens=9)
    tokens = run_dry(core)["probe:0"].tokens
    stop = tokens[4]
    core = guided_core(depth=2)
    add(core, "a", PROMPT, guide="3,9", seed=1, max_tokens=9, stop_token_ids=(stop,))
    done = run_dry(core)["a:0"]
    assert done.tokens == tokens[: tokens.index(stop) + 1]
    assert (done.reason, done.end.stop_token) == (FinishReason.STOP, stop)
    (guide,) = core.guided.guides.made
    assert guide.said == done.tokens[:-1]


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_have_guides_of_their_own_and_a_hit_in_the_prefix_cache_changes_nothing(depth: int) -> None:
    core = guided_core(depth=depth)
    add(core, "a", PROMPT, n=3, guide="5,7", seed=3)
    first = {name: done.tokens for name, done in run_dry(core).items()}
    assert len({tuple(tokens) for tokens in first.values()}) == 3
    assert all(len(tokens) == 7 and obeys(tokens, "5,7") for tokens in first.values())
    add(core, "b", PROMPT, n=3, guide="5,7", seed=3)
    again = run_dry(core)
    assert [done.tokens for done in again.values()] == list(first.values())
    assert again["b:0"].cached_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_of_a_request_with_a_guide_are_those_that_it_allows(depth: int) -> None:
    wanted = outputs_of(guided_core(depth=depth), "3,9")
    drafter = Oracle({"a:0": wanted}, 50, right=0.6)
    core = guided_core(depth=depth, drafter=drafter)
    assert outputs_of(core, "3,9") == wanted
    assert any(row.drafts for plan in submitted(core) for row in plan.rows)
    for plan in submitted(core):
        for row in plan.rows:
            known = wanted[: row.start + 1 - len(PROMPT)]
            assert obeys([*known, *row.drafts], "3,9")


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_that_a_guide_forces_come_before_guesses(depth: int) -> None:
    wanted = outputs_of(guided_core(depth=depth), "50,9,2")
    core = guided_core(depth=depth, drafter=Script(*[[0, 0, 7]] * 9))
    assert outputs_of(core, "50,9,2") == wanted
    counts = core.scheduler.drafting.counts
    assert sum(counts["forced"].accepted) == sum(counts["forced"].drafted) > 3
    assert sum(entry.steps + sum(entry.accepted) for entry in counts.values()) == len(wanted) - 1


def outputs_of(core: EngineCore, rule: str) -> list[int]:
    add(core, "a", PROMPT, guide=rule, seed=1, max_tokens=30)
    return run_dry(core)["a:0"].tokens


@pytest.mark.parametrize(
    ("guide", "words"), [("gibberish", "is no rule"), ("broken", "cannot be used: 'no such thing'")]
)
def test_an_unenforceable_constraint_is_rejected_and_leaves_nothing(guide: str, words: str) -> None:
    core = guided_core()
    with pytest.raises(InvalidRequestError, match=words) as raised:
        add(core, "a", PROMPT, n=2, guide=guide)
    assert raised.value.param is None, "a guide is no field of a request"
    run_dry(core)
    assert not core.guided.live
    add(core, "a", PROMPT, guide="3,6")
    assert len(run_dry(core)["a:0"].tokens) == 6


def test_an_engine_without_guides_rejects_requests_that_need_one() -> None:
    core = make_core()
    with pytest.raises(InvalidRequestError, match="cannot constrain outputs"):
        add(core, "a", PROMPT, guide="3,6")
    run_dry(core)


def test_guides_need_a_runner_that_samples_under_masks() -> None:
    class Plain(FakeRunner):
        capabilities = Capabilities(drafts=True)

    with pytest.raises(ValueError, match="a runner that samples under masks"):
        guided_core(runner=Plain(64, 4))
    assert make_core(runner=Plain(64, 4), drafter=Script())


# --- under grammars ---------------------------------------------------------------------------------------------
LETTERS = "start: /[a-z]{6}/"


def lettered(runner: FakeRunner, guides: GrammarGuideFactory, depth: int = 1) -> dict[str, Collected]:
    """Return three outputs under the same grammar, and a free one."""
    core = make_core(runner=runner, guides=guides, depth=depth, vocab_size=VOCAB)
    for name in "abc":
        add(core, name, PROMPT, guide=LETTERS, seed=ord(name), max_tokens=20)
    add(core, "free", PROMPT, max_tokens=12, ignore_eos=True)
    done = run_dry(core)
    assert done["free:0"].reason is FinishReason.LENGTH
    return done


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_that_a_grammar_forbids_ends_only_its_output(depth: int) -> None:
    class Disobedient(FakeRunner):
        def sample_row(self, row, prints, allowed):
            said = len(self.seats[row.seat].tokens) - len(PROMPT)
            return super().sample_row(row, prints, {0: [ord("7")]} if (row.request_id, said) == ("b:0", 3) else allowed)

    done = lettered(Disobedient(64, 4, VOCAB), grammar_guides(), depth)
    assert done["b:0"].reason is FinishReason.ERROR and len(done["b:0"].tokens) == 4
    error = done["b:0"].end.error
    assert error.startswith(CONSTRAINT_FAILED) and "doesn't satisfy the grammar" in error
    assert [done[name].reason for name in ("a:0", "c:0")] == [FinishReason.STOP] * 2


class CostlyGuides(GrammarGuideFactory):
    """Guides whose masks take `cost_s` of their sequence on the test's clock. `computed`: number of masks by
    request.
    """

    def __init__(self, clock: ToldClock, cost_s, stall_s) -> None:
        super().__init__(lambda: TOKENS, VOCAB)
        self.clock, self.cost_s, self.stall_s = clock, cost_s, stall_s
        self.names: dict[int, str] = {}
        self.computed: Counter[str] = Counter()
        self.longest_s = 0.0
        self.step_s = 0.0

    def fill(self, sources, words, until_s=math.inf, *, threads=True) -> int:
        line = len(words) // len(sources)
        for at, source in enumerate(sources):
            super().fill([source], words[at * line : (at + 1) * line])
            name = self.names[id(source)]
            cost_s = self.cost_s(name)
            self.computed[request_id_of(name)] += 1
            self.clock.run(cost_s)
            self.clock.stand_still(self.stall_s())
            self.step_s += cost_s
            self.longest_s = max(self.longest_s, self.step_s)
            if self.clock.wall_s() > until_s:
                return at + 1
        return len(sources)


class CostlyRun:
    """Requests `(id, n)` with costly constraints, on an engine whose steps otherwise take `step_s`."""

    def __init__(self, requests, cost_s, *, step_s=0.01, depth=1, tokens=20, stall_s=lambda: 0.0) -> None:
        self.clock = ToldClock()
        self.guides = CostlyGuides(self.clock, cost_s, stall_s)
        run = self

        class Noting(FakeRunner):
            def submit(self, plan):
                run.clock.run(step_s)
                run.guides.step_s = 0.0
                live = core.guided.live
                run.guides.names = {id(guide.mask()): name for name, guide in live.items()}
                return super().submit(plan)

        core = make_core(
            runner=Noting(512, 4, VOCAB), num_blocks=512, guides=self.guides, depth=depth, vocab_size=VOCAB,
            max_num_seqs=256, max_num_batched_tokens=2048,
        )  # fmt: skip
        core.guided = GuidedSequences(self.guides, VOCAB, self.clock)
        for name, n in requests:
            spec = GuideSpec(grammar=f"start: /[a-z]{{{tokens}}}/")
            core.add(Add(name, Prompt(PROMPT, SequenceParams(max_tokens=tokens + 1), guide=spec), n, seed=ord(name)))
        self.done = run_dry(core)
        self.stats = core.stats().guides
        assert_empty(core)

    def reasons(self, request_id: str) -> set[FinishReason]:
        return {done.reason for name, done in self.done.items() if request_id_of(name) == request_id}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_whose_masks_are_too_slow_together_ends_with_all_its_samples(depth: int) -> None:
    run = CostlyRun([("a", 1), ("b", 64), ("c", 2)], lambda name: 0.012 if name[0] == "b" else 20e-6, depth=depth)
    assert run.reasons("b") == {FinishReason.ERROR}
    ends = [done.end.error for name, done in run.done.items() if name[0] == "b"]
    assert len(ends) == 64 and all(error.startswith(CONSTRAINT_TOO_SLOW) for error in ends)
    assert run.reasons("a") == run.reasons("c") == {FinishReason.STOP}
    assert run.stats.too_slow == 1
    assert run.guides.longest_s < 0.35, "the first step stops as well"


def test_a_request_that_is_a_little_too_slow_for_long_ends_and_one_that_is_not_does_not() -> None:
    slow = CostlyRun([("a", 1), ("b", 8)], lambda name: 0.004 if name[0] == "b" else 20e-6)
    assert slow.reasons("b") == {FinishReason.ERROR} and slow.reasons("a") == {FinishReason.STOP}
    # Half of the time that a step takes otherwise.
    fair = CostlyRun([("a", 1), ("b", 8)], lambda name: 0.0006 if name[0] == "b" else 20e-6)
    assert fair.reasons("b") == fair.reasons("a") == {FinishReason.STOP} and fair.stats.too_slow == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_single_sample_that_is_slow_in_each_step_ends(depth: int) -> None:
    run = CostlyRun([("b", 1)], lambda name: 0.016, step_s=0.004, depth=depth, tokens=100)
    assert run.reasons("b") == {FinishReason.ERROR} and run.guides.computed["b"] < 30


def test_many_ordinary_masks_end_no_request_even_in_short_steps() -> None:
    run = CostlyRun([(name, 8) for name in "abcdefghijklmnop"], lambda name: 48e-6, step_s=0.001)
    assert all(run.reasons(name) == {FinishReason.STOP} for name in "abcdefghijklmnop")


def test_of_requests_that_are_too_slow_together_the_costliest_ends() -> None:
    cost_s = {"a": 0.004, "b": 0.004, "c": 0.0055, "d": 40e-6}
    run = CostlyRun([(name, 1) for name in "abcd"], lambda name: cost_s[name[0]], step_s=0.009, tokens=200)
    assert run.reasons("c") == {FinishReason.ERROR} and run.reasons("d") == {FinishReason.STOP}


def test_a_step_in_which_many_requests_turn_slow_is_bounded() -> None:
    run = CostlyRun([(name, 8) for name in "abcdefghijklmnop"], lambda name: 0.01 if name[0] != "a" else 20e-6)
    assert run.reasons("a") == {FinishReason.STOP}
    assert run.guides.longest_s < 0.6


def test_a_machine_that_stalls_ends_no_request() -> None:
    calls = itertools.count()
    run = CostlyRun([("a", 2), ("b", 2)], lambda name: 20e-6, stall_s=lambda: 5.0 if next(calls) % 7 == 3 else 0.0)
    assert run.reasons("a") == run.reasons("b") == {FinishReason.STOP}


def test_slow_calls_of_advance_are_charged_too(monkeypatch) -> None:
    clock = ToldClock()

    class Slow(Arithmetic):
        def advance(self, token_ids):
            clock.run(0.02)
            return super().advance(token_ids)

    core = guided_core(depth=2)
    core.guided = GuidedSequences(core.guided.guides, 50, clock)
    add(core, "b", PROMPT, guide="3,40", seed=2, ignore_eos=True, max_tokens=50)
    add(core, "a", PROMPT, guide="3,40", seed=1, ignore_eos=True, max_tokens=50)
    core.step()
    core.guided.live["b:0"].__class__ = Slow
    done = run_dry(core)
    assert done["b:0"].reason is FinishReason.ERROR and done["b:0"].end.error.startswith(CONSTRAINT_TOO_SLOW)
    assert len(done["b:0"].tokens) < 20 and done["a:0"].reason is FinishReason.STOP


def test_a_guide_that_only_bans_tokens_delays_no_step() -> None:
    class Runner(DelayedRunner):
        def sample(self, handle, masks=None):
            self.log.append(f"sample {handle}")
            super().sample(handle, masks)

    runner = Runner(64, 4, VOCAB)
    core = make_core(depth=2, runner=runner, guides=grammar_guides(), vocab_size=VOCAB)
    banned = tuple(range(40))
    params = SequenceParams(max_tokens=9, ignore_eos=True)
    core.add(Add("a", Prompt(PROMPT, params, guide=GuideSpec(banned=banned))))
    assert min(run_dry(core)["a:0"].tokens) >= 40
    assert runner.log[:5] == ["plan 0", "sample 0", "plan 1", "sample 1", "result 0"]


def test_rows_and_grammars_are_counted() -> None:
    trigger = Trigger(grammar='start: "ab"', text="x")
    core = make_core(depth=2, runner=FakeRunner(64, 4, VOCAB), guides=grammar_guides(), vocab_size=VOCAB)
    assert core.stats().guides is None, "nobody has asked"
    add(core, "a", PROMPT, guide=LETTERS, max_tokens=20)
    core.add(
        Add("b", Prompt(PROMPT, SequenceParams(max_tokens=6, ignore_eos=True), guide=GuideSpec(triggers=(trigger,))))
    )
    run_dry(core)
    add(core, "c", PROMPT, guide=LETTERS, max_tokens=20)
    run_dry(core)
    counted = core.stats().guides
    assert (counted.compiled, counted.cached, counted.refused, counted.grammars) == (2, 1, 0, 2)
    assert (counted.rows, counted.dormant_rows) == (18, 6)


def test_the_cost_model_learns_what_masks_take() -> None:
    """Masks take 15 ms and forward passes 10 ms, so the policy learns that a token takes 15 ms."""
    clock = ManualClock()

    class SlowMasks(FakeRunner):
        def mask_space(self, lines: int) -> memoryview:
            clock.advance(0.015)
            return super().mask_space(lines)

    config = scheduler_config(scheduling_policy="slack", max_num_seqs=4, max_num_batched_tokens=32)
    limits = StepLimits.of(config, 400)
    scheduler = Scheduler(config, kv_manager(128, 4), make_policy(config), 400, limits)
    cost = CostParams(step_s=0.010, token_s=0.0, pair_s=0.0, row_s=0.0, context_s=0.0)
    runner = PricedRunner(SlowMasks(128, 4), Machine(cost), clock)
    core = EngineCore(scheduler, runner, clock, vocab_size=50, guides=ArithmeticGuides())
    params = SequenceParams(max_tokens=200, ignore_eos=True)
    slo = RequestMeta(slo=Slo(tpot_s=0.1))
    core.add(Add("a", Prompt(PROMPT, params, slo, GuideSpec(grammar="3,200"))))
    for _ in range(120):
        core.step()
    assert core.stats().policy.predicted_step_s == pytest.approx(0.015, rel=0.03)
    core.abort(["a:0"])
    while core.busy:
        core.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_that_cannot_be_computed_end_the_constrained_outputs_and_not_the_engine(depth: int) -> None:
    class Broken(GrammarGuideFactory):
        masks = 0

        def fill(self, sources, words, until_s=math.inf, *, threads=True) -> int:
            self.masks += 1
            if self.masks == 3:
                raise ValueError("no such memory")
            return super().fill(sources, words, until_s, threads=threads)

    done = lettered(FakeRunner(64, 4, VOCAB), Broken(lambda: TOKENS, VOCAB), depth)
    failed = [done[name] for name in ("a:0", "b:0", "c:0") if done[name].reason is FinishReason.ERROR]
    assert failed and all("no such memory" in one.end.error for one in failed)


def test_a_mask_of_another_length_ends_only_its_output(monkeypatch) -> None:
    core = guided_core()
    add(core, "a", PROMPT, guide="3,6", seed=1)
    add(core, "b", PROMPT, guide="3,6", seed=1)
    core.step()
    wrong = core.guided.live["b:0"]
    monkeypatch.setattr(wrong, "mask", lambda: memoryview(array("I", [1] * 7)))
    done = run_dry(core)
    assert done["b:0"].reason is FinishReason.ERROR and done["a:0"].reason is FinishReason.STOP
