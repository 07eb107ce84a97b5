"""Engine core with a runner that checks every cache access."""

import pytest

from roseinfer.core.errors import NO_TOKEN_ALLOWED, InvalidRequestError, RequestTooLongError
from roseinfer.core.outputs import FinishReason
from tests.helpers.engines import EOS, Collected, add, assert_empty, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import DelayedRunner, FakeRunner

PROMPT = [5, 9, 2, 7, 11, 30, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_one_request_runs_to_its_end(depth: int) -> None:
    core = make_core(depth=depth)
    add(core, "a", PROMPT, max_tokens=5, ignore_eos=True)
    done = run_dry(core)["a:0"]
    assert len(done.tokens) == 5
    assert done.reason is FinishReason.LENGTH


def test_depth_two_plans_the_next_step_before_the_result_arrives() -> None:
    runner = DelayedRunner(64, 4)
    core = make_core(depth=2, runner=runner)
    add(core, "a", PROMPT, max_tokens=3, ignore_eos=True)
    run_dry(core)
    assert runner.log == ["plan 0", "plan 1", "result 0", "plan 2", "result 1", "result 2"]


def test_depth_one_waits_for_each_result() -> None:
    runner = DelayedRunner(64, 4)
    core = make_core(depth=1, runner=runner)
    add(core, "a", PROMPT, max_tokens=3, ignore_eos=True)
    run_dry(core)
    assert runner.log == ["plan 0", "result 0", "plan 1", "result 1", "plan 2", "result 2"]


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_token_ends_the_request_and_nothing_follows(depth: int) -> None:
    core = make_core(depth=depth)
    add(core, "free", PROMPT, max_tokens=20, ignore_eos=True, seed=1)
    tokens = run_dry(core)["free:0"].tokens
    stop = tokens[6]
    core = make_core(depth=depth)
    add(core, "a", PROMPT, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,), seed=1)
    done = run_dry(core)["a:0"]
    assert done.tokens == tokens[: tokens.index(stop) + 1]
    assert (done.reason, done.end.stop_token) == (FinishReason.STOP, stop)


def test_min_tokens_holds_back_the_end() -> None:
    core = make_core(vocab_size=5, runner=FakeRunner(64, 4, vocab_size=5))
    add(core, "a", [1, 2], max_tokens=30, min_tokens=12)
    tokens = run_dry(core)["a:0"].tokens
    assert len(tokens) >= 12
    assert EOS not in tokens[:12]


def test_a_request_that_wants_no_token_reports_its_prompt_only() -> None:
    core = make_core(max_num_batched_tokens=3)
    add(core, "a", PROMPT, max_tokens=0, prompt_logprobs=0)
    done = run_dry(core)["a:0"]
    assert done.tokens == []
    assert done.reason is FinishReason.LENGTH
    assert done.prompt_logprobs == PROMPT[1:]


@pytest.mark.parametrize("prompt_len", [7, 8])
def test_an_exact_repeat_computes_one_token_and_writes_nothing_shared(prompt_len: int) -> None:
    core = make_core()
    prompt = list(range(10, 10 + prompt_len))
    add(core, "a", prompt, seed=4, ignore_eos=True)
    first = run_dry(core)["a:0"]
    add(core, "b", prompt, seed=4, ignore_eos=True)
    runner = core.runner
    steps = len(runner.submitted)
    second = run_dry(core)["b:0"]
    row = runner.submitted[steps].rows[0]
    assert (row.start, row.count, row.write_from) == (prompt_len - 1, 1, prompt_len)
    assert second.tokens == first.tokens
    assert second.cached_tokens == prompt_len - 1


def test_salt_separates_caches() -> None:
    core = make_core()
    add(core, "a", PROMPT, salt="one")
    run_dry(core)
    add(core, "b", PROMPT, salt="two")
    assert run_dry(core)["b:0"].cached_tokens == 0


def test_samples_of_one_prompt_share_its_blocks_and_compute_it_once() -> None:
    for prefix_caching in (True, False):
        core = make_core(prefix_caching=prefix_caching)
        add(core, "a", PROMPT, n=4, seed=7, ignore_eos=True)
        done = run_dry(core)
        assert len({tuple(c.tokens) for c in done.values()}) > 1
        prefill = [row for plan in submitted(core) for row in plan.rows if row.start == 0]
        assert len(prefill) == 1
        copies = [copy for plan in submitted(core) for copy in plan.copies]
        assert len(copies) == 3, "every fork copies the partly filled block, the parent appends in place"
        alone = make_core()
        for i in range(4):
            add(alone, f"{i}", PROMPT, seed=7 + i, ignore_eos=True)
        expected = run_dry(alone)
        assert [done[f"a:{i}"].tokens for i in range(4)] == [expected[f"{i}:0"].tokens for i in range(4)]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_frees_everything_in_every_state(depth: int) -> None:
    core = make_core(depth=depth, max_num_seqs=2, num_blocks=16)
    for name in "abcd":
        add(core, name, [*PROMPT, ord(name) % 40], max_tokens=20, ignore_eos=True)
    collected: dict[str, Collected] = {}
    for _ in range(3):
        gather(core.step(), collected)
    core.abort(["a:0", "d:0", "nobody:0"])  # one running and in flight, one waiting, one unknown
    core.abort(["a:0"])
    gather(core.step(), collected)
    assert collected["a:0"].reason is FinishReason.ABORT
    assert collected["d:0"].reason is FinishReason.ABORT
    core.abort(["b:0", "c:0"])
    run_dry(core, collected)
    assert_empty(core)
    assert not collected["d:0"].tokens


def test_a_failed_row_ends_only_its_request() -> None:
    core = make_core()
    add(core, "probe", PROMPT, seed=1, max_tokens=6, ignore_eos=True)
    bad_token = run_dry(core)["probe:0"].tokens[3]
    other = [1, 2, 4]
    add(core, "probe2", other, seed=2, max_tokens=6, ignore_eos=True)
    expected = run_dry(core)["probe2:0"].tokens
    assert bad_token not in expected
    core = make_core(runner=FakeRunner(64, 4, fail_on_token=bad_token))
    add(core, "bad", PROMPT, seed=1, max_tokens=6, ignore_eos=True)
    add(core, "good", other, seed=2, max_tokens=6, ignore_eos=True)
    done = run_dry(core)
    assert done["bad:0"].reason is FinishReason.ERROR
    assert done["bad:0"].end.error == "planted failure"
    assert done["good:0"].tokens == expected
    add(core, "again", PROMPT, seed=2, max_tokens=1)
    assert run_dry(core)["again:0"].cached_tokens == 0, "what a failed request computed is not to be trusted"


@pytest.mark.parametrize(("failure", "cached"), [("not finite", 0), (f"{NO_TOKEN_ALLOWED}none is left", 8)])
def test_a_failure_forgets_a_shared_prefix_unless_the_request_is_the_cause(failure: str, cached: int) -> None:
    core = make_core()
    assert isinstance(core.runner, FakeRunner)
    prefix = list(range(20, 28))
    add(core, "first", [*prefix, 1], max_tokens=1)
    run_dry(core)
    add(core, "probe", [*prefix, 2], seed=1, max_tokens=2, ignore_eos=True)
    probe = run_dry(core)["probe:0"]
    assert probe.cached_tokens == 8
    core.runner.fail_on_token, core.runner.failure = probe.tokens[1], failure
    add(core, "bad", [*prefix, 2], seed=1, max_tokens=2, ignore_eos=True)
    assert run_dry(core)["bad:0"].end.error == failure
    add(core, "again", [*prefix, 3], max_tokens=1)
    assert run_dry(core)["again:0"].cached_tokens == cached


def test_a_request_that_can_never_run_is_rejected_when_added() -> None:
    core = make_core(num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLongError):
        add(core, "a", [1] * 10, max_tokens=7)
    with pytest.raises(InvalidRequestError, match="empty"):
        add(core, "b", [])
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        add(core, "c", [50])
    add(core, "d", [1] * 8, max_tokens=8, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="in use"):
        add(core, "d", [1])
    assert len(run_dry(core)["d:0"].tokens) == 8, "the longest request that fits does run"


def test_a_lone_request_that_fills_the_cache_and_hits_its_own_prefix_still_runs() -> None:
    core = make_core(num_blocks=4, block_size=4)
    prompt = list(range(10, 24))  # 14 tokens: the last block is partly filled
    add(core, "a", prompt, max_tokens=2, seed=1, ignore_eos=True)
    first = run_dry(core)["a:0"].tokens
    add(core, "b", prompt, max_tokens=2, seed=1, ignore_eos=True)
    assert run_dry(core)["b:0"].tokens == first


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_may_recompute_its_outputs_token_by_token(depth: int) -> None:
    options = {"num_blocks": 6, "block_size": 2, "prefix_caching": False, "long_prefill_token_threshold": 1}
    core = make_core(depth=depth, **options)
    expected = {}
    for i, name in enumerate(("old", "young")):
        alone = make_core()
        for engine in (alone, core):
            add(engine, name, [i + 1] * 4, max_tokens=8, ignore_eos=True, seed=i)
        expected[name] = run_dry(alone)[f"{name}:0"].tokens
    done = run_dry(core)
    assert core.stats().preemptions > 0
    assert {name: done[f"{name}:0"].tokens for name in expected} == expected


def test_no_sample_forks_from_one_that_failed() -> None:
    probe = make_core()
    add(probe, "a", PROMPT, seed=1, max_tokens=3, ignore_eos=True)
    bad_token = run_dry(probe)["a:0"].tokens[1]
    # One seat for the samples: the second can start only after the first has failed with a step in flight.
    core = make_core(runner=FakeRunner(64, 4, fail_on_token=bad_token), depth=2, prefill_max_batch_size=1)
    add(core, "a", PROMPT, n=3, seed=1, max_tokens=3, ignore_eos=True)
    collected: dict[str, Collected] = {}
    while "a:0" not in collected or collected["a:0"].end is None:
        gather(core.step(), collected)
    assert collected["a:0"].reason is FinishReason.ERROR
    later = len(submitted(core))
    run_dry(core, collected)
    starts = [row for plan in submitted(core)[later:] for row in plan.rows if row.request_id == "a:2"]
    assert starts[0].start == 0, "computed anew"


def test_adding_many_samples_is_all_or_nothing() -> None:
    core = make_core()
    add(core, "a", PROMPT, n=2)
    with pytest.raises(InvalidRequestError):
        add(core, "a", PROMPT, n=3)
    done = run_dry(core)
    assert sorted(done) == ["a:0", "a:1"]
