"""One or several engines as one: a request goes to the engine that can best keep its objectives, and on if that dies.

All of it that its reader has seen is in this process. So it survives an engine: without an output it starts again
elsewhere, with the same seed and age; otherwise another engine computes its tokens again and goes on behind them.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config import DEFAULT_ROUTER
from roseinfer.core.errors import EngineClosedError, RoseinferError
from roseinfer.core.outputs import SchedulerStats, added
from roseinfer.core.slo import Rejection
from roseinfer.engine.api import (
    EngineHealth,
    EngineInfo,
    EngineReport,
    GenerateRequest,
    RoutingObserver,
    Sink,
    StepRecord,
)
from roseinfer.engine.board import Board
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.dispatch import Dispatcher
from roseinfer.engine.live import Inflight, LiveRequest, LiveRequests
from roseinfer.engine.mailbox import Mailbox, MailboxStream
from roseinfer.engine.slot import EngineSlot, homeless, no_engine
from roseinfer.engine.transport import SocketTransport, Transport
from roseinfer.router.placer import Placer
from roseinfer.router.record import RecordingPlacer
from roseinfer.router.registry import KEYED
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# How often it is looked whether an engine drains or is quiet, and how long a start waits for those that are not first.
LOOK_S = 0.1
OTHERS_S = 0.5
# About how long a request takes until an engine has read it, in seconds.
DELAY_S = 0.0005


class RoutedEngine:
    """See `engine.api.Engine`. Made by `RoutedEngine.start`; all methods belong to the event loop it was started in.

    It is the `Heir` of the engines that it connects to. With one there is nothing to choose: requests go there as they
    come.
    """

    def __init__(
        self,
        transports: Sequence[Callable[[], Transport]],
        board: Board,
        requests: LiveRequests,
        *,
        router: str = DEFAULT_ROUTER,
        processes: int = 1,
        record: Path | None = None,
        seed: int | None = None,
    ) -> None:
        self.info: EngineInfo
        self._board = board
        self._requests = requests
        self._clock = requests.clock
        self._slots = [
            EngineSlot(number, self._way(transport), board, self._clock) for number, transport in enumerate(transports)
        ]
        self._router = router
        self._processes = processes
        self._record = record
        self._placer: Placer | None = None  # with several engines
        self._observer: RoutingObserver | None = None
        self._seed = seed
        self._dispatcher: Dispatcher | None = None  # with several engines, once one is up
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    async def start(
        cls,
        addresses: Sequence[Path],
        board_path: Path,
        tokenizer: Tokenizer,
        *,
        router: str = DEFAULT_ROUTER,
        inflight: Inflight | None = None,
        prefix: str = "",
        processes: int = 1,
        record: Path | None = None,
        clock: Clock | None = None,
    ) -> "RoutedEngine":
        """Connect to engines that somebody else owns. Returns once one is up, however long that takes; it is for the
        owner to say that none will be. Raises `ResourceError` if the board cannot be read, and `ConfigError` if
        `record`, where the router's decisions go, cannot be written.

        `inflight` limits the requests in all of them together; `prefix` tells our requests from those of other
        processes, of which there are `processes` with this one.
        """
        requests = LiveRequests(tokenizer, clock or MonotonicClock(), inflight or Inflight(), prefix)
        transports = [_socket_to(address) for address in addresses]
        board = Board.open(board_path)
        engine = cls(transports, board, requests, router=router, processes=processes, record=record)
        try:
            await engine.open()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def open(self) -> None:
        """Returns once an engine is up; the others are waited for a moment only."""
        self._tasks = [asyncio.create_task(slot.keep(self._on_up)) for slot in self._slots]
        for task in self._tasks:
            task.add_done_callback(_say_failure)
        ups = [asyncio.create_task(_set(slot.up)) for slot in self._slots]
        try:
            await asyncio.wait([*ups, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.wait(ups, timeout=OTHERS_S)
        finally:
            for up in ups:
                up.cancel()
        self._tasks.append(asyncio.create_task(self._watch()))

    def _way(self, transport: Callable[[], Transport]) -> Callable[[], AsyncEngine]:
        return lambda: AsyncEngine(transport(), self._requests, self)

    # --- requests -----------------------------------------------------------------------------------------------
    def generate(self, request: GenerateRequest) -> MailboxStream:
        mailbox = Mailbox(request.n)
        return MailboxStream(mailbox, self.submit(request, mailbox))

    def submit(self, request: GenerateRequest, sink: Sink) -> LiveRequest:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        live = self._requests.make(request, sink, self.info)
        slot = self._only() if self._dispatcher is None else self._dispatcher.place(live)
        if slot is None:
            raise no_engine(self._slots)
        assert slot.engine is not None
        slot.engine.adopt(live)
        self._requests.add(live)
        return live

    def _only(self) -> EngineSlot | None:
        slot = self._slots[0]
        # One that is quiet may come back, and there is no other.
        return slot if slot.there and not slot.draining else None

    # --- engines ------------------------------------------------------------------------------------------------
    def _on_up(self, slot: EngineSlot, another: bool) -> None:
        assert slot.info is not None
        if self._dispatcher is None:
            self.info = slot.info
            if len(self._slots) > 1:
                self._dispatcher = self._dispatcher_for(slot.info)
        if self._dispatcher is None:
            slot.look()
        else:
            self._dispatcher.risen(slot, another)

    def _dispatcher_for(self, info: EngineInfo) -> Dispatcher:
        make = Placer if self._record is None else partial(RecordingPlacer, self._record)
        placer = make(
            self._router,
            [slot.number for slot in self._slots],
            share=self._processes,
            blocks=info.num_blocks,
            delay_s=DELAY_S,
            seed=self._seed,
        )
        self._placer = placer
        keyed = self._router in KEYED and info.prefix_caching
        dispatcher = Dispatcher(self._slots, placer, self._requests, keyed=keyed, block_size=info.block_size)
        if self._observer is not None:
            dispatcher.observer = self._observer
        return dispatcher

    async def _watch(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:
                log.exception("the engines could not be looked at")

    def look(self) -> None:
        """What is done every `LOOK_S` seconds."""
        if self._dispatcher is None:
            self._read_board()
        else:
            self._dispatcher.tend()

    def _read_board(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.look()  # each promise is found new once, and the router must not miss it
            return
        for slot in self._slots:
            slot.look()

    # --- what engines do not bring to its end, see `Heir` -------------------------------------------------------
    def lost(self, engine: AsyncEngine, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        slot = next((slot for slot in self._slots if slot.engine is engine), None)
        if slot is None:  # it was not up yet
            return
        slot.lose(reason)
        level = logging.INFO if slot.draining else logging.WARNING
        log.log(level, "engine %d is gone with %d requests: %s", slot.number, len(requests), reason)
        if self._dispatcher is not None:
            self._dispatcher.lost(slot, requests, reason, suspects)
            return
        on_purpose = slot.draining and not suspects
        for live in requests:
            if live in self._requests:
                live.fail(homeless(live, self._slots, reason, on_purpose=on_purpose))

    def refused(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        return rejection if self._dispatcher is None else self._dispatcher.refused(live, rejection)

    def cancelled(self, live: LiveRequest) -> None:
        if self._dispatcher is not None:
            self._dispatcher.cancelled(live)

    def started(self, live: LiveRequest, cached_tokens: int) -> None:
        if self._dispatcher is not None:
            self._dispatcher.started(live, cached_tokens)

    # --- reports ------------------------------------------------------------------------------------------------
    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def health(self) -> EngineHealth:
        """That of the liveliest engine."""
        return min([slot.health() for slot in self._slots], key=_weakness)

    def stats(self) -> SchedulerStats:
        """The sum over all engines."""
        return added([slot.stats() for slot in self._slots])

    def reports(self) -> list[EngineReport]:
        if not self._closed:
            self._read_board()
        return [slot.report() for slot in self._slots]

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """The engines are somebody else's, who is told of steps."""

    def on_routing(self, observer: RoutingObserver) -> None:
        self._observer = observer
        if self._dispatcher is not None:
            self._dispatcher.observer = observer

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for live in self._requests.all():
            if live in self._requests:
                if live.engine is not None:
                    live.engine.withdraw(live)
                live.fail(EngineClosedError("the engine was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots:
            await slot.close()
        if isinstance(self._placer, RecordingPlacer):
            self._placer.close()
        self._board.close()


def _socket_to(address: Path) -> Callable[[], Transport]:
    return lambda: SocketTransport(address)


def _say_failure(task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        known = isinstance(error, RoseinferError)
        log.error("the way to an engine is not looked after any more: %s", error, exc_info=None if known else error)


def _weakness(health: EngineHealth) -> tuple[bool, bool, float]:
    return not health.alive, health.final, health.heartbeat_age_s


async def _set(event: asyncio.Event) -> None:
    await event.wait()
