"""Requests with recurrent states: which prefixes they find, who waits for a slot, and what samples share."""

import random

import pytest

from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Cause
from roseinfer.engine.core import EngineCore
from tests.helpers.cases import cases, each_value
from tests.helpers.drafters import Oracle, every_draft_of
from tests.helpers.engines import EOS, Collected, add, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import FakeRunner

SIZES = {"num_blocks": 2000, "block_size": 16, "max_num_batched_tokens": 128, "max_model_len": 20000}


def text(seed: int, count: int) -> list[int]:
    """Return tokens that end no request."""
    return random.Random(seed).choices([token for token in range(50) if token != EOS], k=count)


def core_of(num_slots: int = 16, **options: object) -> EngineCore:
    return make_core(num_slots=num_slots, **{**SIZES, **options})


def answer(core: EngineCore, name: str, prompt: list[int], **options: object) -> Collected:
    """Run one request alone."""
    add(core, name, prompt, **{"max_tokens": 4, "ignore_eos": True, **options})
    return run_dry(core)[f"{name}:0"]


def cached(core: EngineCore, prompt: list[int], **options: object) -> int:
    """Run one request alone and return how much of its prompt it finds."""
    return answer(core, f"r{core.stats().requests}", prompt, **options).cached_tokens


@pytest.mark.parametrize(("length", "found"), [(1, 0), (16, 0), (17, 16), (100, 96), (112, 96), (113, 112), (500, 496)])
def test_a_repeated_prompt_finds_its_last_full_block_but_not_its_last_token(length: int, found: int) -> None:
    core, prompt = core_of(), text(1, length)
    assert [cached(core, prompt) for _ in range(3)] == [0, found, found]


def test_a_later_turn_finds_the_messages_before_the_generation_prompt() -> None:
    core, history = core_of(), text(1, 200)
    cached(core, [*history, *text(2, 20)], generation_prompt_len=20)
    assert cached(core, [*history, *text(3, 50)]) == 192


def test_prompts_that_share_a_beginning_find_it_after_the_first_divergence() -> None:
    core, shared = core_of(), text(1, 300)
    assert [cached(core, shared + text(2 + turn, 100)) for turn in range(4)] == [0, 0, 288, 288]
    assert core.stats().prefix_hits == 2 * 288


@pytest.mark.parametrize("policy", ["fifo", "qoserve", "slack"])
def test_waiting_requests_find_snapshots_that_others_take(policy: str) -> None:
    core, shared = core_of(max_num_seqs=1, scheduling_policy=policy), text(1, 300)
    cached(core, shared + text(2, 100))
    for name in "bcd":
        add(core, name, shared + text(ord(name), 100), max_tokens=4, ignore_eos=True)
    done = run_dry(core)
    assert [done[f"{name}:0"].cached_tokens for name in "bcd"] == [0, 288, 288]


def test_a_prompt_that_continues_a_known_one_has_a_snapshot_at_its_end_only() -> None:
    core, prompt = core_of(), text(1, 100)
    said = answer(core, "a", prompt, max_tokens=29).tokens
    before = core.stats().states
    cached(core, [*prompt, *said[:-1], *text(2, 30)])
    after = core.stats().states
    assert before is not None and after is not None and after.taken - before.taken == 1


def test_many_turns_of_several_conversations_need_few_slots() -> None:
    core = core_of(5)
    histories = [text(seed, 300) for seed in range(3)]
    for turn in range(8):
        for number, history in enumerate(histories):
            found = cached(core, history)
            assert turn == 0 or found > len(history) - 120
            histories[number] = [*history, *text(100 * turn + number, 100)]


@each_value(depth=[1, 2], outputs=[63, 64, 200, 317])
def test_a_later_turn_finds_all_but_the_end_of_the_output(depth: int, outputs: int) -> None:
    core, prompt = core_of(depth=depth), text(1, 100)
    said = answer(core, "a", prompt, max_tokens=outputs).tokens
    assert len(said) == outputs
    found = cached(core, [*prompt, *said, *text(2, 30)])
    assert found > 100 + outputs - 1 - 64


def test_a_decoding_request_keeps_one_snapshot_of_its_output() -> None:
    core = core_of()
    answer(core, "a", text(1, 20), max_tokens=400)
    states = core.stats().states
    assert states is not None
    assert (states.snapshots, states.taken, states.skipped, states.slots_used, states.slots_total) == (2, 7, 0, 0, 16)


def test_turns_of_an_agent_find_what_they_share() -> None:
    """The history drops what the model said between the generation prompt and its answer."""
    core = make_core(num_slots=8, num_blocks=500, block_size=16, max_num_batched_tokens=2048)
    history, equal, shared, found = text(1, 1500), 0, 0, 0
    for turn in range(6):
        prompt = [*history, *text(100 + turn, 8)]
        done = answer(core, f"turn{turn}", prompt, max_tokens=50, generation_prompt_len=8)
        if turn:
            shared, found = shared + equal, found + done.cached_tokens
        equal = len(history)
        history += [*done.tokens[30:], *text(200 + turn, 200)]
    assert found / shared > 0.98


def test_blocks_in_host_memory_are_loaded_up_to_a_snapshot() -> None:
    """The KV cache forgets the prompt, and no snapshot of it is overwritten."""
    core, prompt = core_of(64, num_blocks=40, num_host_blocks=200, max_model_len=640), text(1, 300)
    assert cached(core, prompt) == 0
    for other in range(2, 8):
        cached(core, text(other, 500))
    assert cached(core, prompt) == 288
    offload = core.stats().offload
    assert offload is not None and offload.loaded == 18


def test_a_load_continues_after_blocks_that_no_snapshot_follows() -> None:
    core, prompt = core_of(64, num_blocks=40, num_host_blocks=200, max_model_len=640), text(1, 300)
    for number in range(2):
        cached(core, prompt)
        cached(core, text(2 + number, 470))  # the KV cache keeps the beginning of the prompt
    add(core, "again", prompt, max_tokens=4)
    (request,) = core.scheduler.waiting
    hit = core.scheduler.kv.match("again:0", prompt)
    assert hit.tokens == 0 and core.scheduler.seating.uncached(request) == 300 - 288
    done = run_dry(core)["again:0"]
    offload = core.stats().offload
    assert done.cached_tokens == 288 and offload is not None and offload.loaded % 18 > 0


def test_a_preempted_request_continues_from_its_last_snapshot() -> None:
    core = core_of(num_blocks=18, max_model_len=288)  # two requests of 150 tokens do not fit
    for name in "ab":
        add(core, name, text(ord(name), 20), max_tokens=130, ignore_eos=True)
    run_dry(core)
    preempted = [new for plan in submitted(core) for new in plan.admitted if len(new.token_ids) > 20]
    assert preempted and core.stats().preemptions == len(preempted)
    starts = {plan.step: {row.request_id: row.start for row in plan.rows} for plan in submitted(core)}
    for plan in submitted(core):
        for new in plan.admitted:
            if len(new.token_ids) > 20:
                assert len(new.token_ids) - 64 <= starts[plan.step][new.request_id] < len(new.token_ids)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("budget", "length"), [(128, 100), (100, 100), (99, 100), (5, 30), (128, 97), (128, 1), (7, 2)]
)
def test_samples_compute_the_last_token_of_the_prompt_only(depth: int, budget: int, length: int) -> None:
    core = core_of(depth=depth, max_num_batched_tokens=budget)
    add(core, "a", text(1, length), n=5, max_tokens=4, ignore_eos=True)
    run_dry(core)
    rows = [row for plan in submitted(core) for row in plan.rows]
    first = {f"a:{index}": next(row for row in rows if row.request_id == f"a:{index}") for index in range(1, 5)}
    assert {(row.start, row.count) for row in first.values()} == {(length - 1, 1)}


def test_samples_of_a_cached_prompt_continue_from_its_snapshot() -> None:
    """Sample 0 computes the last token only, after a snapshot that another request has taken."""
    core, prompt = core_of(), text(1, 97)
    assert cached(core, prompt) == 0
    add(core, "a", prompt, n=3, max_tokens=4, ignore_eos=True)
    done = run_dry(core)
    assert [done[f"a:{index}"].cached_tokens for index in range(3)] == [96, 96, 96]


def test_the_state_for_samples_is_released_when_none_waits() -> None:
    core = core_of(num_slots=4, prefix_caching=False)
    add(core, "a", text(1, 40), n=4, max_tokens=8, ignore_eos=True)
    core.step()
    core.step()
    assert core.scheduler.kv.states is not None
    for _ in range(3):
        core.abort([f"a:{index}" for index in (1, 2, 3)])
        core.step()
    assert core.scheduler.kv.states.pool.num_free == 3
    run_dry(core)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_samples_with_few_slots_wait_for_one(num_slots: int) -> None:
    core = core_of(num_slots)
    add(core, "a", text(1, 40), n=4, max_tokens=8, ignore_eos=True)
    done = run_dry(core)
    assert all(len(each.tokens) == 8 for each in done.values()) and len(done) == 4


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"])
def test_requests_wait_for_a_slot_and_say_so(policy: str) -> None:
    core = core_of(2, scheduling_policy=policy, max_num_seqs=8)
    for name in "abc":
        add(core, name, text(ord(name), 20), max_tokens=4, ignore_eos=True)
    done: dict[str, Collected] = {}
    most = 0
    while core.busy:
        gather(core.step(), done)
        core.clock.advance(1.0)
        most = max(most, core.stats().running)
    assert most == 2
    why = done["c:0"].end.why
    assert dict(why.waited).keys() == {Cause.SLOTS}
    states = core.stats().states
    assert states is not None and states.skipped > 0, "snapshots were not worth a sequence's slot"


def test_snapshots_of_a_failed_request_are_not_found() -> None:
    prompt = text(1, 40)
    for fail in (False, True):
        said = answer(core_of(), "a", prompt, max_tokens=100).tokens
        runner = FakeRunner(2000, 16, 50, fail_on_token=said[70] if fail else None, num_slots=16)
        core = core_of(runner=runner)
        first = answer(core, "a", prompt, max_tokens=100)
        assert (first.reason is FinishReason.ERROR) == fail
        runner.fail_on_token = None
        assert cached(core, prompt) == (0 if fail else 32)


@cases("right", [0.7], exhaustive=[0.0, 1.0])
def test_drafts_do_not_change_where_snapshots_are(right: float) -> None:
    """A position that a draft passes has its snapshot in the row that consumes the draft."""
    core, prompt = core_of(), text(1, 100)
    said = answer(core, "a", prompt, max_tokens=317).tokens
    plain = core.stats().states
    core = core_of(drafting=every_draft_of(Oracle({"a:0": said}, 50, right, 8)))
    assert answer(core, "a", prompt, max_tokens=317).tokens == said
    drafted = core.stats().states
    assert plain is not None and drafted is not None and (drafted.taken, drafted.skipped) == (plain.taken, 0)
    changes = [plan.states for plan in submitted(core) if plan.states is not None]
    tokens = [snapshot.tokens for change in changes for snapshot in change.snapshots]
    assert any(count < 1 for count in tokens) == (right > 0)
    assert cached(core, [*prompt, *said, *text(2, 30)]) > 100 + 317 - 1 - 64
