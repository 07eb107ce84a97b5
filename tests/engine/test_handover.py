"""A live request goes from one engine to another: what its reader sees is what one engine would have said."""

import asyncio
from collections.abc import Callable, Collection, Coroutine

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import EngineClosedError, InvalidRequestError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.sampling import SamplingParams
from roseinfer.core.slo import Rejection
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.live import Inflight, LiveRequest, LiveRequests
from roseinfer.engine.messages import Rejected
from tests.helpers.model_engine import ModelEngine, expected_ids
from tests.helpers.routed_fleet import Reader
from tests.helpers.tokenizers import byte_tokenizer

PROMPT = [5, 9, 2, 7]


class Pair:
    """Two engines; what the first does not bring to its end goes to the second."""

    def __init__(self) -> None:
        self.inflight = Inflight()
        self.requests = LiveRequests(byte_tokenizer(), ManualClock(), self.inflight, "w")
        self.models = [ModelEngine(), ModelEngine()]
        self.engines = [AsyncEngine(model, self.requests, self) for model in self.models]
        self.losses: list[tuple[str, Collection[str]]] = []
        self.answer: Rejection | None = None

    def lost(self, engine: AsyncEngine, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        self.losses.append((reason, suspects))
        for live in requests:
            self.engines[1].adopt(live)

    def refused(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        if self.answer is None:
            self.engines[0].withdraw(live)
            self.engines[1].adopt(live)
        return self.answer

    def started(self, live: LiveRequest, cached_tokens: int) -> None:
        pass

    def submit(self, name: str, n: int = 1, **params: object) -> tuple[LiveRequest, Reader]:
        merged = {"max_tokens": 6, "seed": 7, **params}
        reader = Reader()
        request = GenerateRequest(request_id=name, prompt_ids=PROMPT, params=SamplingParams(**merged), n=n)
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
async def test_what_has_no_output_yet_starts_again_elsewhere(pair: Pair) -> None:
    _, reader = pair.submit("a", n=2)
    pair.models[0].die()
    first, second = pair.models[0].adds[0], pair.models[1].adds[0]
    assert first.request_id != second.request_id
    assert (second.params.seed, second.meta.arrival_s, second.n) == (7, first.meta.arrival_s, 2)
    for _ in range(6):
        pair.models[1].step()
    assert [reader.ids(i) for i in range(2)] == [expected_ids(PROMPT, 7 + i, 6) for i in range(2)]
    assert reader.ends == [FinishReason.LENGTH] * 2 and not reader.errors


@with_pair
async def test_what_an_engine_says_of_a_request_that_has_left_it_is_dropped(pair: Pair) -> None:
    live, reader = pair.submit("a")
    pair.models[0].frozen = True
    pair.models[0].step(3)
    pair.engines[0].withdraw(live)
    pair.engines[1].adopt(live)
    pair.models[0].thaw()
    assert not reader.chunks and not pair.models[0].samples, "it has been told to forget it"
    pair.models[1].step(6)
    assert reader.ids() == expected_ids(PROMPT, 7, 6)


@with_pair
async def test_a_refusal_is_shown_or_hidden_as_the_heir_says(pair: Pair) -> None:
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

    check()


@with_pair
async def test_an_engine_that_refuses_what_came_to_it_ends_that_alone(pair: Pair) -> None:
    live, reader = pair.submit("a")
    _, other = pair.submit("b")
    pair.models[0].die()
    pair.models[1].samples.pop(f"{live.wire_id}:0")
    pair.models[1].tell(Rejected(live.wire_id, "too long", None, "no_room"))
    assert isinstance(reader.errors[0], InvalidRequestError) and not other.errors
    pair.models[1].step(6)
    assert other.ends == [FinishReason.LENGTH]
    assert pair.losses == [("planted death", ())]
