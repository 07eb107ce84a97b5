"""Live requests move from one engine to another. The client receives the output of a single engine."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import EngineClosedError, InvalidRequestError
from roseinfer.core.outputs import FinishReason, RequestTimes, SchedulerStats, SequenceOutput
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import Seeds, SequenceParams
from roseinfer.core.slo import Rejection
from roseinfer.engine.adapter_names import AdapterEntry
from roseinfer.engine.api import GenerateRequest, StepRecord
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.live import InflightLimit, LiveRequest, LiveRequests
from roseinfer.engine.messages import Heartbeat, Invalid
from tests.helpers.model_engine import ModelEngine, expected_ids
from tests.helpers.routed_fleet import Reader
from tests.helpers.tokenizers import byte_tokenizer

PROMPT = [5, 9, 2, 7]


class Pair:
    """Two engines; requests that the first does not finish move to the second."""

    def __init__(self) -> None:
        self.inflight = InflightLimit()
        self.requests = LiveRequests(byte_tokenizer(), ManualClock(), self.inflight, "w")
        self.models = [ModelEngine(), ModelEngine()]
        self.engines = [AsyncEngine(model, self.requests, self) for model in self.models]
        self.losses: list[tuple[str, Collection[str]]] = []
        self.answer: Rejection | None = None
        self.cancelled_ones: list[LiveRequest] = []

    def lost(self, engine: AsyncEngine, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        self.losses.append((reason, suspects))
        for live in requests:
            self.engines[1].send(live)

    def rejected(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        if self.answer is None:
            self.engines[0].withdraw(live)
            self.engines[1].send(live)
        return self.answer

    def cancelled(self, live: LiveRequest) -> None:
        self.cancelled_ones.append(live)

    def started(self, live: LiveRequest, cached_tokens: int) -> None:
        pass

    def adapters_changed(self, entries: Mapping[str, AdapterEntry]) -> None:
        pass

    def submit(self, name: str, n: int = 1, **params: object) -> tuple[LiveRequest, Reader]:
        merged = {"max_tokens": 6, "seed": 7, **params}
        reader = Reader()
        request = GenerateRequest(request_id=name, prompt=Prompt(PROMPT, SequenceParams(**merged)), n=n)
        return self.engines[0].submit(request, reader), reader


def with_pair(work: Callable[[Pair], Coroutine[None, None, None]]) -> Callable[[], None]:
    async def main() -> None:
        pair = Pair()
        for engine in pair.engines:
            await engine.connect()
        await work(pair)
        assert len(pair.requests) == pair.inflight.own == 0
        assert all(not engine._sequences for engine in pair.engines)
        assert all(not model.samples for model in pair.models), "nothing is left in an engine"

    def test() -> None:
        asyncio.run(main())

    test.__doc__ = work.__doc__
    return test


@with_pair
async def test_requests_without_output_start_again_on_another_engine(pair: Pair) -> None:
    _, reader = pair.submit("a", n=2)
    pair.models[0].die()
    first, second = pair.models[0].adds[0], pair.models[1].adds[0]
    assert first.request_id != second.request_id
    assert (second.prompt.params.seed, second.n, second.outputs) == (7, 2, None)
    for _ in range(6):
        pair.models[1].step()
    assert [reader.ids(i) for i in range(2)] == [expected_ids(PROMPT, 7 + i, 6) for i in range(2)]
    assert reader.ends == [FinishReason.LENGTH] * 2 and not reader.errors


@with_pair
async def test_requests_of_an_engine_whose_messages_fail_here_move_on_and_are_aborted_there(pair: Pair) -> None:
    def listener(step: StepRecord) -> None:
        raise RuntimeError("planted listener failure")

    _, reader = pair.submit("a")
    pair.models[0].step(2)
    pair.engines[0].on_step(listener)
    pair.models[0].tell(Heartbeat(SchedulerStats(), 10.0, [StepRecord(1, 0.01)]))
    assert len(pair.losses) == 1 and "planted listener failure" in pair.losses[0][0]
    assert not pair.models[0].samples, "the engine still runs"
    pair.models[1].step(4)
    assert reader.ids() == expected_ids(PROMPT, 7, 6) and not reader.errors


@with_pair
async def test_messages_about_a_request_that_has_moved_are_dropped(pair: Pair) -> None:
    live, reader = pair.submit("a")
    pair.models[0].frozen = True
    pair.models[0].step(3)
    pair.engines[0].withdraw(live)
    pair.engines[1].send(live)
    pair.models[0].thaw()
    assert not reader.chunks and not pair.models[0].samples, "it has been told to forget it"
    pair.models[1].step(6)
    assert reader.ids() == expected_ids(PROMPT, 7, 6)


@with_pair
async def test_a_rejection_is_shown_or_hidden_as_the_dispatcher_decides(pair: Pair) -> None:
    _, reader = pair.submit("a", n=2)
    first = pair.models[0]
    first.refuse(first.samples["w0:0"])
    assert not reader.chunks and not first.samples, "the other sample has gone with it"
    pair.models[1].step(6)
    assert reader.ends == [FinishReason.LENGTH] * 2
    _, reader = pair.submit("b")
    pair.answer = Rejection("ttft", 0.25)
    first.refuse(first.samples["w2:0"])
    assert [chunk.rejection for chunk in reader.chunks] == [Rejection("ttft", 0.25)]
    assert reader.ends == [FinishReason.REJECTED]


@pytest.mark.parametrize("moved", [False, True])
def test_a_request_can_be_cancelled_wherever_it_is(moved: bool) -> None:
    @with_pair
    async def check(pair: Pair) -> None:
        live, reader = pair.submit("a", n=3)
        if moved:
            pair.models[0].die()
        live.cancel()
        live.cancel()
        assert [type(error) for error in reader.errors] == [EngineClosedError]
        assert pair.cancelled_ones == [live]

    check()


@with_pair
async def test_an_engine_that_rejects_a_moved_request_ends_only_that_request(pair: Pair) -> None:
    live, reader = pair.submit("a")
    _, other = pair.submit("b")
    pair.models[0].die()
    pair.models[1].samples.pop(f"{live.wire_id}:0")
    pair.models[1].tell(Invalid(live.wire_id, "too long", None, "no_room"))
    assert isinstance(reader.errors[0], InvalidRequestError) and not other.errors
    pair.models[1].step(6)
    assert other.ends == [FinishReason.LENGTH]
    assert pair.losses == [("planted death", ())]


@with_pair
async def test_a_request_with_output_continues_after_it(pair: Pair) -> None:
    """One sample has ended, one has tokens, and one has no output."""
    _, reader = pair.submit("a", n=3, max_tokens=4)
    first, second = pair.models
    first.step(4, only=lambda sample: sample.index == 0)
    first.step(3, only=lambda sample: sample.index == 1)
    first.die()
    said = second.adds[0].outputs
    assert said is not None and said[0] is None
    assert [one.token_ids for one in said[1:]] == [expected_ids(PROMPT, 8, 3), []]
    assert said[1].ttft_s == 2.0, "as the first engine said"
    second.step(4)
    assert [reader.ids(i) for i in range(3)] == [expected_ids(PROMPT, 7 + i, 4) for i in range(3)]
    assert reader.ends == [FinishReason.LENGTH] * 3 and not reader.errors
    counts = [chunk.num_output_tokens for chunk in reader.chunks if chunk.finish_reason is not None]
    assert counts == [4] * 3


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_stop_string_is_found_across_the_change(cut: int) -> None:
    text = bytes(expected_ids(PROMPT, 7, 9)).decode()

    @with_pair
    async def check(pair: Pair) -> None:
        _, reader = pair.submit("a", max_tokens=9, stop=(text[3:6],))
        pair.models[0].step(cut)
        pair.models[0].die()
        pair.models[1].step(6 - cut)
        assert "".join(chunk.text for chunk in reader.chunks) == text[:3]
        assert reader.ends == [FinishReason.STOP] and reader.chunks[-1].stop_reason == text[3:6]

    check()


@with_pair
async def test_an_engine_gets_ages_and_its_times_are_converted(pair: Pair) -> None:
    """The clocks are unrelated: the engines' shows 10 and ours 100."""
    clock = pair.requests.clock
    assert isinstance(clock, ManualClock)
    clock.advance(100.0)
    reader = Reader()
    meta = RequestMeta(arrival_s=97.0, deadline_s=110.0, tenant="t")
    params = SequenceParams(max_tokens=2, seed=1)
    pair.engines[0].submit(GenerateRequest(request_id="a", prompt=Prompt(PROMPT, params, meta)), reader)
    clock.advance(4.0)
    pair.models[0].step()
    pair.models[0].die()
    clock.advance(2.0)
    pair.models[1].step()
    first, second = (model.adds[0] for model in pair.models)
    assert [(add.age_s, add.left_s, add.sent_s) for add in (first, second)] == [(3.0, 10.0, 100.0), (7.0, 6.0, 104.0)]
    assert first.prompt.meta == second.prompt.meta
    # PriorOutput to be 1, 2, 3 and 9 when it was 10: the first three by the first engine, the last by the second.
    assert reader.chunks[-1].times == RequestTimes(95.0, 96.0, 97.0, 105.0)


@with_pair
async def test_the_requests_that_an_engine_suspects_are_named(pair: Pair) -> None:
    live, _ = pair.submit("a")
    pair.submit("b")
    there, first = live.wire_id, pair.models[0]
    first.fail(first.samples[f"{there}:0"])
    assert pair.losses == [("the engine failed: planted failure", {there})]
    pair.models[1].step(6)


@with_pair
async def test_a_request_without_a_seed_keeps_the_one_that_was_drawn(pair: Pair) -> None:
    live, reader = pair.submit("a", n=2, seed=None)
    pair.submit("b", seed=None)
    first = pair.models[0]
    seeds = [add.seed for add in first.adds]
    assert seeds == [live.seed, live.seed + 2], "no other sample draws alike"
    first.step(2)
    first.die()
    pair.models[1].step(6)
    assert [reader.ids(i) for i in range(2)] == [expected_ids(PROMPT, live.seed + i, 6) for i in range(2)]


def test_clients_of_an_engine_draw_different_seeds_and_each_the_same_again() -> None:
    def drawn(seed: int, prefix: str) -> list[int]:
        seeds = Seeds(seed, prefix)
        return [seeds.draw(samples) for samples in (1, 3, 1)]

    streams = {(seed, prefix): drawn(seed, prefix) for seed in (0, 1) for prefix in ("", "0-", "1-")}
    assert len({one for stream in streams.values() for one in stream}) == 18
    assert streams == {(seed, prefix): drawn(seed, prefix) for seed, prefix in streams}
    first, second, third = streams[0, ""]
    assert (second, third) == (first + 1, first + 4)
    assert all(-(2**63) <= one < 2**63 for one in drawn(2**61, "") + drawn(-(2**61), "x"))


@with_pair
async def test_incomplete_prompt_log_probabilities_are_collected_again(pair: Pair) -> None:
    live, reader = pair.submit("a", prompt_logprobs=0, max_tokens=1)
    part = SequenceOutput(f"{live.wire_id}:0", prompt_logprobs=(TokenLogprobs(9, -1.0, 1, ()),))
    pair.models[0].say([part])
    pair.models[0].die()
    whole = tuple(TokenLogprobs(token, -2.0, 1, ()) for token in PROMPT[1:])
    pair.models[1].say([SequenceOutput(f"{live.wire_id}:0", prompt_logprobs=whole)])
    pair.models[1].step()
    assert reader.chunks[0].prompt_logprobs == [None, *whole]
