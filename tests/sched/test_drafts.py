"""Rows that verify drafts: what they hold, what comes of them, and who may have them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.outputs import DraftRun, DraftStats, FinishReason
from roseinfer.core.plan import StepPlan
from roseinfer.core.runner import Capabilities
from tests.helpers.cases import examples
from tests.helpers.drafters import Oracle, Script
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import DelayedRunner, FakeRunner

PROMPT = [5, 9, 2, 7, 11, 30, 8]
WRONG = 49


def said(**params: object) -> list[int]:
    """Return the request's output without drafts."""
    core = make_core()
    add(core, "a", PROMPT, **{"ignore_eos": True, "seed": 1, **params})
    return run_dry(core)["a:0"].tokens


def steps(core, **params: object) -> tuple[list[list[int]], Collected]:
    """The tokens that each step adds to the request, and all that is said of it."""
    add(core, "a", PROMPT, **{"ignore_eos": True, "seed": 1, **params})
    collected, told = {}, []
    while core.busy:
        outputs = core.step()
        told += [list(output.token_ids) for output in outputs]
        gather(outputs, collected)
        core.scheduler.check_integrity()
    return told, collected["a:0"]


def test_an_output_names_the_drafts_of_its_row() -> None:
    tokens = said()
    core = make_core(drafter=Script([*tokens[1:3], WRONG], [WRONG]))
    add(core, "a", PROMPT, ignore_eos=True, seed=1)
    outputs = [output for _ in range(4) for output in core.step()]
    assert [(len(output.token_ids), output.drafts) for output in outputs] == [
        (1, ()),
        (3, (DraftRun("test", 3),)),
        (1, (DraftRun("test", 1),)),
        (1, ()),
    ]
    assert core.stats().drafts == (DraftStats("test", 2, (2, 1, 1), (1, 1, 0)),)


def verifying(plans: list[StepPlan]) -> list[tuple[int, ...]]:
    return [row.drafts for plan in plans for row in plan.rows if row.drafts]


@pytest.mark.parametrize(
    ("wrong_at", "lengths"),
    [(None, [1, 4, 1, 1, 1]), (2, [1, 3, 1, 1, 1, 1]), (0, [1, 1, 1, 1, 1, 1, 1, 1])],
    ids=["accepted", "partly accepted", "rejected"],
)
def test_a_step_adds_the_right_drafts_and_the_token_after_them(wrong_at: int | None, lengths: list[int]) -> None:
    tokens = said()
    drafts = tokens[1:4]
    if wrong_at is not None:
        drafts[wrong_at] = WRONG
    core = make_core(drafter=Script(drafts))
    told, done = steps(core, logprobs=0)
    assert [len(step) for step in told] == lengths
    assert done.tokens == tokens and done.logprobs == tokens
    plan = submitted(core)[1]
    (row,) = plan.rows
    assert (row.start, row.count, row.logits, row.sample) == (len(PROMPT), 4, 4, True)
    assert (plan.num_tokens, plan.num_drafts) == (4, 3)
    assert submitted(core)[2].rows[0].start == len(PROMPT) + lengths[1]


def test_log_probabilities_are_those_of_each_token() -> None:
    tokens = said()
    for drafter in (None, Script(tokens[1:4]), Script([tokens[1], WRONG, 4])):
        core = make_core(drafter=drafter)
        add(core, "a", PROMPT, ignore_eos=True, seed=1, logprobs=0)
        scores = [entry.logprob for _ in range(9) for output in core.step() for entry in output.logprobs or ()]
        assert scores == [-float(len(PROMPT) + i) for i in range(8)]


def test_tokens_after_a_stop_token_are_cut_with_their_log_probabilities() -> None:
    tokens = said()
    stop = tokens[3]
    assert stop not in tokens[:3]
    core = make_core(drafter=Script(tokens[1:7]))
    told, done = steps(core, stop_token_ids=(stop,), logprobs=0)
    assert told == [tokens[:1], tokens[1:4]]
    assert (done.reason, done.end.stop_token, done.logprobs) == (FinishReason.STOP, stop, tokens[:4])
    assert core.stats().generation_tokens == 4


def test_a_stop_token_that_is_a_draft_is_held_back_as_long_as_it_would_be() -> None:
    tokens = said(max_tokens=10)
    stop = tokens[2]
    wanted = said(max_tokens=10, stop_token_ids=(stop,), min_tokens=6)
    assert len(wanted) > 3
    core = make_core(drafter=Script(tokens[1:6], wanted[2:5]))
    assert steps(core, max_tokens=10, stop_token_ids=(stop,), min_tokens=6)[1].tokens == wanted


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_is_proposed_than_the_request_may_say(depth: int) -> None:
    tokens = said(max_tokens=4)
    drafter = Oracle({"a:0": said(max_tokens=30)}, 50, right=1.0, most=20)
    core = make_core(depth=depth, drafter=drafter)
    _, done = steps(core, max_tokens=4)
    assert done.tokens == tokens and done.reason is FinishReason.LENGTH
    assert max(map(len, verifying(submitted(core)))) <= 2


def test_drafts_take_what_a_step_has_left_and_nobody_waits_for_them() -> None:
    """The prompt of the second request comes first; the budget of 8 leaves nothing beside it."""
    drafter = Script(*[[1, 2, 3, 4, 5, 6, 7]] * 20)
    core = make_core(drafter=drafter, max_num_batched_tokens=8, scheduling_policy="fifo")
    add(core, "a", PROMPT, ignore_eos=True, max_tokens=20)
    core.step()
    add(core, "b", [40] * 14, ignore_eos=True, max_tokens=2)
    run_dry(core)
    plans = submitted(core)
    assert [(row.request_id, row.count) for row in plans[1].rows] == [("a:0", 1), ("b:0", 7)]
    assert [(row.request_id, row.count) for row in plans[2].rows] == [("a:0", 1), ("b:0", 7)]
    assert all(plan.num_tokens <= 8 for plan in plans)
    assert any(plan.num_drafts == 7 for plan in plans)


def test_drafts_preempt_nobody() -> None:
    """Two requests fill the cache but for a block: drafts get what the block holds."""
    drafter = Script(*[[WRONG] * 12] * 40)
    core = make_core(num_blocks=6, block_size=4, max_model_len=24, drafter=drafter, prefix_caching=False)
    for name in "ab":
        add(core, name, PROMPT, ignore_eos=True, max_tokens=4, seed=1)
    done = run_dry(core)
    assert core.stats().preemptions == 0
    assert {name: end.tokens for name, end in done.items()} == dict.fromkeys(("a:0", "b:0"), said(max_tokens=4))
    assert verifying(submitted(core))


def test_what_wrong_drafts_leave_behind_is_nobodys_prefix() -> None:
    tokens = said(max_tokens=8)
    core = make_core(block_size=2, drafter=Script([*tokens[1:3], WRONG, WRONG, WRONG]))
    first = run_or_abort(core)
    assert first == tokens[:4]
    prompt = [*PROMPT, *tokens[:3], WRONG, WRONG, WRONG, 1]
    add(core, "b", prompt, ignore_eos=True, max_tokens=2, seed=2)
    alone = make_core()
    add(alone, "b", prompt, ignore_eos=True, max_tokens=2, seed=2)
    done = run_dry(core)["b:0"]
    assert done.tokens == run_dry(alone)["b:0"].tokens
    assert done.cached_tokens == 10, "the prompt and the right drafts, in whole blocks"


def run_or_abort(core) -> list[int]:
    """Two steps of the request, the second of which verifies drafts."""
    add(core, "a", PROMPT, ignore_eos=True, seed=1)
    collected: dict[str, Collected] = {}
    for _ in range(2):
        gather(core.step(), collected)
    core.abort(["a:0"])
    run_dry(core, collected)
    return collected["a:0"].tokens


def test_drafts_are_guessed_from_known_tokens_although_two_steps_may_be_in_flight() -> None:
    """Each step is committed before the next is planned while drafts may pay; without drafts, two steps overlap."""
    tokens = said()
    for drafter, log in (
        (Script(tokens[1:3]), ["plan 0", "result 0", "plan 1", "result 1", "plan 2", "result 2"]),
        (None, ["plan 0", "plan 1", "result 0", "plan 2", "result 1", "plan 3"]),
    ):
        runner = DelayedRunner(64, 4)
        core = make_core(depth=2, runner=runner, drafter=drafter)
        told, done = steps(core)
        assert done.tokens == tokens
        assert runner.log[:6] == log
        assert not drafter or told == [tokens[:1], tokens[1:4], *([token] for token in tokens[4:])]


def test_proposers_hear_of_every_end() -> None:
    drafter = Script([1, 2])
    core = make_core(depth=2, drafter=drafter)
    add(core, "a", PROMPT, ignore_eos=True)
    add(core, "b", PROMPT, ignore_eos=True)
    core.step()
    core.abort(["b:0"])
    run_dry(core)
    assert sorted(drafter.gone) == ["a:0", "b:0"]


@examples(60, derandomize=True)
@given(seed=st.integers(0, 10**6), right=st.sampled_from([0.0, 0.6, 1.0]), limit=st.integers(1, 20))
def test_accepted_drafts_and_verify_steps_add_up_to_the_tokens_of_these_rows(seed, right, limit) -> None:
    rng = random.Random(seed)
    outputs = {f"{name}:0": said(max_tokens=limit, seed=ord(name)) for name in "abc"}
    core = make_core(depth=rng.choice([1, 2]), drafter=Oracle(outputs, 50, right, seed=seed))
    for name in "abc":
        add(core, name, PROMPT, ignore_eos=True, seed=ord(name), max_tokens=limit)
    run_dry(core)
    rows = [row for plan in submitted(core) for row in plan.rows]
    tokens = 0
    for name in outputs:
        own = [(row.start, row.drafts) for row in rows if row.request_id == name]
        ends = [*(start for start, _ in own[1:]), len(PROMPT) + limit - 1]
        tokens += sum(end - start for (start, drafts), end in zip(own, ends, strict=True) if drafts)
    counts = core.scheduler.drafting.counts.get("test")
    assert (0 if counts is None else counts.steps + sum(counts.accepted)) == tokens
    if counts:
        assert all(accepted <= drafted for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True))


def test_nobody_sits_a_step_out_while_drafts_are_verified() -> None:
    """Two steps in flight would make requests take turns: two half batches read the weights twice."""
    core = make_core(depth=2, drafter=Oracle({"a:0": said(max_tokens=24)}, 50, right=0.8, most=2))
    add(core, "a", PROMPT, ignore_eos=True, seed=1, max_tokens=24)
    add(core, "b", PROMPT[:3], ignore_eos=True, seed=2, max_tokens=8)
    for _ in range(5):
        core.step()
    plans = submitted(core)
    assert sum(plan.num_drafts > 0 for plan in plans) >= 3
    assert [len(plan.rows) for plan in plans] == [2] * len(plans)
    run_dry(core)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_whose_drafts_are_verified_is_not_planned(depth: int) -> None:
    core = make_core(drafter=Script([1, 2], [3]))
    scheduler, runner = core.scheduler, core.runner
    add(core, "a", PROMPT, ignore_eos=True)
    core.step()
    plan = scheduler.plan(0.0)
    assert plan.num_drafts == 2
    assert scheduler.plan(0.0) is None and scheduler.has_work
    if depth == 2:  # it is preempted and ended meanwhile, too
        core.abort(["a:0"])
        scheduler.check_integrity()
    handle = runner.submit(plan)
    runner.sample(handle)
    outputs = scheduler.commit(plan, runner.collect(handle), 0.0)
    assert bool(outputs) == (depth == 1)
    scheduler.check_integrity()
    run_dry(core)


def test_samples_of_one_prompt_verify_drafts_of_their_own() -> None:
    plain = make_core()
    add(plain, "a", PROMPT, n=3, seed=7, ignore_eos=True)
    wanted = {name: done.tokens for name, done in run_dry(plain).items()}
    for depth in (1, 2):
        core = make_core(depth=depth, drafter=Oracle(wanted, 50, right=0.7))
        add(core, "a", PROMPT, n=3, seed=7, ignore_eos=True)
        assert {name: done.tokens for name, done in run_dry(core).items()} == wanted
        assert verifying(submitted(core))


def test_a_drafter_needs_a_runner_that_verifies() -> None:
    class Plain(FakeRunner):
        capabilities = Capabilities()

    with pytest.raises(ValueError, match="needs a runner that verifies drafts"):
        make_core(runner=Plain(64, 4), drafter=Script())
