"""A routed engine over engines that a test steps, kills, freezes and starts again by hand."""

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from roseinfer.cluster.dispatch import Dispatcher
from roseinfer.cluster.displaced import SETTLE_S
from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.engine_rows import EngineRows
from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.cluster.status import EngineStatus
from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.promise import Promise
from roseinfer.core.request import NO_META, Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import EngineInfo, EngineState, GenerateRequest, SequenceChunk
from roseinfer.engine.live import InflightLimit, LiveRequest, LiveRequests
from tests.helpers.model_engine import INFO, ModelEngine, Sample, expected_ids
from tests.helpers.tokenizers import byte_tokenizer

FROM_THE_FIRST = 2  # a seed with which taking turns begins there
MOST_ENGINES = 64


class NoBoard:
    """A `StatusReader` of engines that promise nothing."""

    def write_count(self, engine: int) -> int:
        return 0

    def promise(self, engine: int) -> Promise | None:
        return None

    def status(self, engine: int) -> EngineStatus:
        return EngineStatus(EngineState.READY, 1)

    def close(self) -> None: ...


NO_BOARD = NoBoard()


class Cables:
    """A `StatusReader` of a board of which some rows come from hosts that are cut off."""

    def __init__(self, board: EngineRows, host_lost: set[int]) -> None:
        self.write_count, self.promise, self.close = board.write_count, board.promise, board.close
        self._board = board
        self._host_lost = host_lost

    def status(self, engine: int) -> EngineStatus:
        return self._board.status(engine)._replace(host_lost=engine in self._host_lost)


class Reader:
    """A sink that keeps all, and sees that nothing comes behind the end."""

    def __init__(self) -> None:
        self.chunks: list[SequenceChunk] = []
        self.errors: list[RoseinferError] = []

    def put(self, chunk: SequenceChunk) -> None:
        assert not self.errors and all(
            other.finish_reason is None for other in self.chunks if other.index == chunk.index
        ), "it has ended"
        self.chunks.append(chunk)

    def fail(self, error: RoseinferError) -> None:
        assert not self.errors, "it has failed"
        self.errors.append(error)

    def ids(self, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks if chunk.index == index for token in chunk.token_ids]

    @property
    def ends(self) -> list[FinishReason]:
        return [chunk.finish_reason for chunk in self.chunks if chunk.finish_reason is not None]


class Observed:
    """A `RoutingObserver` that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []
        self.here: set[int] = set()
        self.gone: set[int] = set()

    def placed(self, engine: int, reason: str) -> None:
        self.said.append(("placed", engine))

    def retried(self, engine: int) -> None:
        self.said.append(("retried", engine))

    def placed_again(self, engine: int, cause: str) -> None:
        self.said.append(("placed again", engine, cause))

    def resumed(self, engine: int, cause: str) -> None:
        self.said.append(("resumed", engine, cause))

    def breaker(self, engine: int, open: bool) -> None:
        self.said.append(("breaker", engine, open))

    def engine_added(self, engine: int) -> None:
        assert engine not in self.here and engine not in self.gone, "a number is given once"
        self.here.add(engine)

    def engine_removed(self, engine: int) -> None:
        self.here.remove(engine)
        self.gone.add(engine)


class Fleet:
    """`models[i]` is the present process of engine i. `reach` connects to one, as the routed engine would by itself.
    With `dynamic`, engines may be added and retired, up to `MOST_ENGINES` ever.
    """

    def __init__(
        self,
        folder: Path,
        engines: int,
        router: str = "round-robin",
        record: Path | None = None,
        dynamic: bool = False,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.board = EngineRows.create(folder / "board", MOST_ENGINES if dynamic else engines)
        self.models = [ModelEngine(clock=self.clock) for _ in range(engines)]
        self.inflight = InflightLimit()
        self.requests = LiveRequests(byte_tokenizer(), self.clock, self.inflight, "w")
        self.observed = Observed()
        self.host_lost: set[int] = set()
        ways = [self.connector(number) for number in range(engines)]
        setup = RouterSetup(name=router, record=record, seed=FROM_THE_FIRST)
        self.routed = RoutedEngine(ways, self.requests, setup, dynamic=dynamic)
        self.routed.on_routing(self.observed)
        self._names = itertools.count()
        for number in range(engines):
            self.stand(number, EngineState.READY, 1)

    def connector(self, number: int) -> Connector:
        return Connector(lambda: self.models[number], Cables(self.board, self.host_lost))

    @property
    def engines(self) -> list[int]:
        """Engines that were not removed."""
        return [endpoint.number for endpoint in self.routed.endpoints]

    def add(self, info: EngineInfo = INFO) -> int:
        """One more engine, which has yet to be reached."""
        number = self.routed.add(self.connector)
        assert number == len(self.models)
        self.models.append(ModelEngine(info=info, clock=self.clock))
        self.stand(number, EngineState.READY, 1)
        return number

    def stand(self, number: int, state: EngineState, process: int | None = None) -> None:
        """Deliver the owner's messages."""
        process = self.board.status(number).number if process is None else process
        self.board.set_status(number, EngineStatus(state, process))

    def promise(self, number: int, **given: object) -> None:
        """Deliver the engine's messages."""
        self.board.publish(number, Promise(self.clock.now(), **given))  # type: ignore[arg-type]

    async def reach(self, *numbers: int) -> None:
        for number in numbers or self.engines:
            await self.routed.endpoints[number].reach(self.routed.on_up)

    def die(self, *numbers: int) -> None:
        """Kill engines at once: all losses are noticed before other engines get their requests."""
        for number in numbers:
            self.lose(number)
        self.settle()

    def lose(self, number: int) -> None:
        """Kill an engine. Its requests stay between engines until `settle`."""
        self.stand(number, EngineState.DEAD)
        self.board.clear(number)
        self.models[number].die()

    def fail(self, number: int, *suspects: Sample) -> None:
        """Let an engine report that it failed."""
        self.models[number].fail(*suspects)
        self.settle()

    def settle(self) -> None:
        """Let the time pass after which requests of a lost engine are sent to others."""
        self.clock.advance(SETTLE_S)
        self.routed.place_displaced()

    def replace(self, number: int) -> None:
        """Another process in its place."""
        assert self.models[number].dead
        self.models[number] = ModelEngine(clock=self.clock)
        self.stand(number, EngineState.READY, self.board.status(number).number + 1)

    async def restart(self, number: int) -> None:
        self.replace(number)
        await self.reach(number)

    async def reconnect(self, number: int) -> None:
        """The same process over another connection."""
        self.models[number].break_off()
        self.settle()
        self.models[number] = ModelEngine(clock=self.clock)
        await self.reach(number)

    def freeze(self, number: int, *, host_lost: bool = False) -> None:
        """`host_lost`: nothing is heard of its owner either."""
        self.models[number].frozen = True
        if host_lost:
            self.host_lost.add(number)
        self.stand(number, EngineState.QUIET)

    def thaw(self, number: int) -> None:
        self.host_lost.discard(number)
        self.stand(number, EngineState.READY)
        self.models[number].thaw()

    def submit(
        self, n: int = 1, meta: RequestMeta = NO_META, prompt: list[int] | None = None, **params: object
    ) -> "Asked":
        number = next(self._names)
        merged = {"max_tokens": 6, "seed": 7 * number, **params}
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt=Prompt(prompt or [number % 200, 5, 9, 2, 7], SequenceParams(**merged), meta),
            n=n,
        )
        reader = Reader()
        return Asked(request, reader, self.routed.submit(request, reader))

    def requests_to(self, number: int, asked: "Asked") -> None:
        """Put a request into an engine, as a drain might."""
        dispatcher, live = self.routed._dispatcher, asked.live
        assert live.engine is not None and live.routing is not None and isinstance(dispatcher, Dispatcher)
        assert self.routed.placer is not None
        live.engine.withdraw(live)
        but = [other for other in self.engines if other != number]
        placement = self.routed.placer.place(live.routing.placement.request, self.clock.now(), but)
        assert placement is not None
        dispatcher._move(live, placement, "drain")

    def where(self, asked: "Asked") -> int | None:
        """The engine that a request is in."""
        found = [
            endpoint.number for endpoint in self.routed.endpoints if endpoint.engine is asked.live.engine is not None
        ]
        return found[0] if found else None

    def samples(self, asked: "Asked") -> list[Sample]:
        """Return the sequences of a request that an engine works on."""
        names = {asked.live.sequence_id(text) for text in asked.live.texts}
        return [sample for model in self.models for name, sample in model.samples.items() if name in names]

    def finish(self) -> None:
        """Run until all open requests have ended."""
        turns = itertools.count()
        while any(model.samples and not model.frozen for model in self.models):
            assert next(turns) < 1000, [(model.dead, list(model.samples.values())) for model in self.models]
            for model in self.models:
                if not model.dead and not model.frozen:
                    model.step()
        for model in self.models:
            assert not model.samples, "nothing is left in an engine"

    def check_empty(self) -> None:
        assert self.routed.num_live == self.inflight.own == 0
        for endpoint in self.routed.endpoints:
            assert endpoint.engine is None or not endpoint.engine._sequences


class Asked:
    """A request and what came of it."""

    def __init__(self, request: GenerateRequest, reader: Reader, live: LiveRequest) -> None:
        self.request = request
        self.reader = reader
        self.live = live

    @property
    def ended(self) -> bool:
        return bool(self.reader.errors) or len(self.reader.ends) == self.request.n

    def expected(self, index: int = 0) -> list[int]:
        params = self.request.prompt.params
        seed = self.live.seed if params.seed is None else params.seed
        assert seed is not None
        return expected_ids(self.request.prompt.ids, seed + index, params.max_tokens)

    def check_whole(self) -> None:
        """Every sample ended by itself, with all its tokens."""
        assert not self.reader.errors
        assert self.reader.ends == [FinishReason.LENGTH] * self.request.n
        for index in range(self.request.n):
            assert self.reader.ids(index) == self.expected(index)
            text = "".join(chunk.text for chunk in self.reader.chunks if chunk.index == index)
            assert text == bytes(self.expected(index)).decode(), "the text has no seam"

    def check_part(self) -> None:
        """Assert that the tokens before the end are the expected ones."""
        for index in range(self.request.n):
            ids = self.reader.ids(index)
            assert ids == self.expected(index)[: len(ids)]


async def with_fleet(
    work: Callable[[Fleet], Awaitable[None]],
    engines: int = 2,
    router: str = "round-robin",
    reached: bool = True,
    dynamic: bool = False,
) -> None:
    """Run `work` with reachable engines, and assert that no request is left at the end."""
    with TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), engines, router, dynamic=dynamic)
        if reached:
            await fleet.reach()
        await work(fleet)
        fleet.finish()
        fleet.check_empty()
        await fleet.routed.close()
