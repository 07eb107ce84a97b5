"""Prompt-only requests in the engine core: one vector each, whatever the schedule, and nothing left behind."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.errors import InvalidRequestError, RequestFailedError, RequestTooLongError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.pooling import PoolingInfo, PoolingMethod, PoolingParams, PoolingTask
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.pooling import PooledOutput, PromptRejectedError, pooled, pooling_prompt
from roseinfer.engine.thread_transport import ThreadTransport
from tests.helpers.cases import examples
from tests.helpers.engine_info import engine_info
from tests.helpers.engines import Collected, add, assert_empty, gather, make_core, run_dry, submitted
from tests.helpers.fake_runner import FakeRunner, fingerprint, pooled_prints
from tests.helpers.in_loop import run, until
from tests.helpers.tokenizers import byte_tokenizer

PROMPT = [5, 9, 2, 7, 11, 30, 8]


def info(method: PoolingMethod = PoolingMethod.LAST, **fields: object) -> PoolingInfo:
    return PoolingInfo(**{"task": PoolingTask.EMBED, "method": method, "width": 64, **fields})


def ask(core: EngineCore, name: str, prompt: list[int], meta: RequestMeta | None = None, **fields: object) -> None:
    core.add(Add(name, pooling_prompt(prompt, meta or RequestMeta(), PoolingParams(**fields))))


def expected(prompt: list[int], method: PoolingMethod) -> bytes:
    prints, previous = [], 0
    for token in prompt:
        previous = fingerprint(previous, token)
        prints.append(previous)
    return pooled_prints(prints if method.needs_every_position else prints[-1:])


@pytest.mark.parametrize("method", list(PoolingMethod))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_ends_with_its_last_chunk_and_has_a_vector(depth: int, method: PoolingMethod) -> None:
    core = make_core(depth=depth, pooling=info(method), max_num_batched_tokens=3)
    ask(core, "a", PROMPT)
    done = run_dry(core)["a:0"]
    assert (done.reason, done.tokens) == (FinishReason.STOP, [])
    assert done.end.vector == expected(PROMPT, method)
    assert sum(row.count for plan in submitted(core) for row in plan.rows) == len(PROMPT)
    assert done.end.times.first_token_s == done.end.times.finished_s
    assert core.stats().generation_tokens == 0 and core.stats().prompt_tokens == len(PROMPT)


def test_a_repeat_computes_only_its_last_position() -> None:
    core = make_core(pooling=info())
    ask(core, "a", PROMPT)
    first = run_dry(core)["a:0"]
    steps = len(submitted(core))
    ask(core, "b", PROMPT)
    again = run_dry(core)["b:0"]
    assert [row.count for plan in submitted(core)[steps:] for row in plan.rows] == [1]
    assert again.cached_tokens == len(PROMPT) - 1
    assert again.end.vector == first.end.vector


@pytest.mark.parametrize("method", [PoolingMethod.MEAN, PoolingMethod.CLS])
def test_pooling_of_all_positions_ignores_cached_prefixes(method: PoolingMethod) -> None:
    core = make_core(pooling=info(method))
    for name in "ab":
        ask(core, name, PROMPT)
        done = run_dry(core)[f"{name}:0"]
        assert (done.cached_tokens, done.end.vector) == (0, expected(PROMPT, method))


def test_a_prompt_may_fill_the_context() -> None:
    core = make_core(pooling=info(), max_model_len=7)
    ask(core, "a", PROMPT)
    assert run_dry(core)["a:0"].reason is FinishReason.STOP
    with pytest.raises(RequestTooLongError, match=r"the prompt has 8 tokens\.$"):
        ask(core, "b", [*PROMPT, 1])
    assert_empty(core)


@pytest.mark.parametrize(
    ("slo", "order"),
    [(None, ["long:0", "a:0", "b:0", "c:0"]), (Slo(ttft_s=0.05), ["a:0", "b:0", "c:0", "long:0"])],
)
def test_requests_end_in_order_of_arrival_or_of_their_deadlines(slo: Slo | None, order: list[str]) -> None:
    core = make_core(pooling=info(), max_num_batched_tokens=8, scheduling_policy="slack")
    ask(core, "long", [1] * 60)
    for name in "abc":
        ask(core, name, [2, ord(name) % 50], RequestMeta(slo=slo))
    ends: list[str] = []
    while core.busy:
        ends += [output.request_id for output in core.step() if output.end is not None]
        core.clock.advance(0.01)
    assert ends == order


def test_an_engine_serves_either_kind_of_request() -> None:
    pools, generates = make_core(pooling=info()), make_core()
    with pytest.raises(InvalidRequestError, match="does not generate text: its task is embed") as caught:
        add(pools, "a", PROMPT)
    assert caught.value.param == "model"
    with pytest.raises(InvalidRequestError, match="generates text") as caught:
        ask(generates, "a", PROMPT)
    assert caught.value.param == "model"
    assert not pools.busy and not generates.busy


@pytest.mark.parametrize(
    ("add_fields", "param"),
    [({"n": 2}, "n"), ({"prompt": Prompt(PROMPT, SequenceParams(max_tokens=1), pooling=PoolingParams())}, "n")],
)
def test_a_prompt_only_request_has_no_output(add_fields: dict, param: str) -> None:
    core = make_core(pooling=info())
    with pytest.raises(InvalidRequestError) as caught:
        core.add(Add(**{"request_id": "a", "prompt": pooling_prompt(PROMPT), **add_fields}))
    assert caught.value.param == param


def test_an_objective_per_output_token_is_refused() -> None:
    core = make_core(pooling=info())
    with pytest.raises(InvalidRequestError, match="no output tokens") as caught:
        ask(core, "a", PROMPT, RequestMeta(slo=Slo(tpot_s=0.1)))
    assert caught.value.param == "slo.tpot_s"


@pytest.mark.parametrize(
    ("fields", "wanted", "error"),
    [
        ({}, 65, "dimensions is 65, but embeddings have 64"),
        ({}, 32, "not trained for shorter embeddings"),
        ({"dimensions": (16, 32)}, 8, "expected one of 16, 32"),
        ({"any_dimension_from": 32}, 31, "expected 32 to 64"),
        ({}, 0, "must be a positive integer"),
        ({"task": PoolingTask.SCORE, "width": 1}, 1, "the model returns scores"),
    ],
)
def test_dimensions_that_the_model_does_not_have_are_refused(fields: dict, wanted: int, error: str) -> None:
    core = make_core(pooling=info(**fields))
    with pytest.raises(InvalidRequestError, match=error) as caught:
        ask(core, "a", PROMPT, dimensions=wanted)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("fields", "wanted"), [({}, 64), ({"dimensions": (16, 32)}, 16), ({"any_dimension_from": 32}, 40)]
)
def test_dimensions_that_the_model_has_are_accepted(fields: dict, wanted: int) -> None:
    core = make_core(pooling=info(**fields))
    ask(core, "a", PROMPT, dimensions=wanted)
    assert run_dry(core)["a:0"].reason is FinishReason.STOP
    (admission,) = submitted(core)[0].admitted
    assert admission.pooling == PoolingParams(dimensions=wanted)


def test_an_objective_out_of_reach_is_rejected_before_any_work() -> None:
    core = make_core(pooling=info(), scheduling_policy="slack")
    ask(core, "a", [1] * 40, RequestMeta(slo=Slo(ttft_s=1e-9)))
    done = run_dry(core)["a:0"]
    assert done.reason is FinishReason.REJECTED
    assert (done.end.rejection.reason, done.end.vector) == ("ttft", None)
    assert not submitted(core)


@pytest.mark.parametrize(("tenant", "ends"), [("light", True), ("heavy", False)])
def test_a_tenant_with_many_texts_does_not_delay_another(tenant: str, ends: bool) -> None:
    core = make_core(pooling=info(), scheduling_policy="slack", prefix_caching=False)
    ended: list[str] = []

    def turns(count: int) -> None:
        for _ in range(count):
            ended.extend(output.request_id for output in core.step() if output.end is not None)
            core.clock.advance(0.01)

    for number in range(60):
        for text in "ab":
            ask(core, f"heavy {number} {text}", [number % 50] * 32, RequestMeta(tenant="heavy", slo=Slo(ttft_s=60.0)))
        ask(core, f"light {number}", [number % 50], RequestMeta(tenant="light", slo=Slo(ttft_s=60.0)))
        turns(1)
    ask(core, "late", [7] * 20, RequestMeta(tenant=tenant, slo=Slo(ttft_s=60.0)))
    turns(4)
    assert ("late:0" in ended) is ends


@examples(60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    method=st.sampled_from(list(PoolingMethod)),
    policy=st.sampled_from(["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"]),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 4]),
    spare_blocks=st.integers(0, 8),
    budget=st.integers(1, 20),
    chunked=st.booleans(),
)
def test_any_schedule_gives_the_same_vectors(
    seed: int,
    method: PoolingMethod,
    policy: str,
    depth: int,
    block_size: int,
    spare_blocks: int,
    budget: int,
    chunked: bool,
) -> None:
    rng = random.Random(seed)
    heads = [[rng.randrange(12) for _ in range(rng.randrange(1, 16))] for _ in range(3)]
    prompts = [rng.choice(heads) + [rng.randrange(12) for _ in range(rng.choice([0, 1, 5]))] for _ in range(12)]
    num_blocks = -(-max(map(len, prompts)) // block_size) + spare_blocks
    fails_on = rng.choice([None, 11])
    runner = FakeRunner(num_blocks, block_size, fail_on_token=fails_on, pooling=info(method))
    core = make_core(
        pooling=info(method),
        runner=runner,
        depth=depth,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        scheduling_policy=policy,
    )
    done: dict[str, Collected] = {}
    for number, prompt in enumerate(prompts):
        ask(core, str(number), prompt, RequestMeta(slo=rng.choice([None, Slo(ttft_s=1e6)])))
        if rng.random() < 0.2:
            core.abort([f"{rng.randrange(number + 1)}:0"])
        if rng.random() < 0.5:
            gather(core.step(), done)
            core.scheduler.check_integrity()
    run_dry(core, done)
    assert len(done) == len(prompts)
    for number, prompt in enumerate(prompts):
        end = done[f"{number}:0"].end
        if end.reason is FinishReason.STOP:
            assert end.vector == expected(prompt, method)
        else:
            assert end.vector is None
            assert end.reason is (FinishReason.ABORT if end.error is None else FinishReason.ERROR)
            assert end.error is None or fails_on in prompt


async def pool(engine: AsyncEngine, request_id: str, prompt: Prompt) -> PooledOutput:
    """Run a prompt-only request, and abort it if the caller is cancelled."""
    stream = engine.generate(GenerateRequest(request_id=request_id, prompt=prompt))
    try:
        return pooled(prompt, await anext(aiter(stream)))
    finally:
        stream.cancel()


def test_a_client_gets_the_vectors_in_any_number_and_leaves_nothing_after_an_abort() -> None:
    async def scenario() -> None:
        pooling = info(PoolingMethod.MEAN)
        core = make_core(pooling=pooling, runner=FakeRunner(64, 4, fail_on_token=49, pooling=pooling))
        description = engine_info(pooling=pooling, vocab_size=50)
        engine = await AsyncEngine.start(ThreadTransport(lambda: (core, description)), byte_tokenizer())
        prompts = [[1 + i, *range(20, 20 + i)] for i in range(20)]
        try:
            gone = asyncio.create_task(pool(engine, "gone", pooling_prompt(PROMPT * 4)))
            await asyncio.sleep(0)
            gone.cancel()
            got = await asyncio.gather(
                *(pool(engine, str(i), pooling_prompt(prompt)) for i, prompt in enumerate(prompts)),
                pool(engine, "fails", pooling_prompt([9, 49, 9])),
                pool(engine, "late", pooling_prompt([1], RequestMeta(deadline_s=0.0))),
                pool(engine, "objective", pooling_prompt([1], RequestMeta(slo=Slo(ttft_s=1e-9)))),
                return_exceptions=True,
            )
            assert [type(error) for error in got[20:]] == [RequestFailedError, RequestFailedError, PromptRejectedError]
            assert [found.vector for found in got[:20]] == [expected(p, pooling.method) for p in prompts]
            assert [found.prompt_tokens for found in got[:20]] == [len(p) for p in prompts]
            await until(lambda: core.scheduler.num_live == 0)
        finally:
            await engine.close()

    run(scenario())
