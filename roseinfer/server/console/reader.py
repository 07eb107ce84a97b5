"""Source of one console's feed: changes in all processes of the server."""

import random
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

import orjson

from roseinfer.core.clock import Clock
from roseinfer.server.console.engines import engine_updates
from roseinfer.server.console.events import hello
from roseinfer.server.console.exchange import TOPIC, EngineUpdates, Position, Updates, decode_updates, encode
from roseinfer.server.console.updates import MAX_REQUESTS_PER_EVENT, request_updates, routed_numbers, router_json
from roseinfer.server.observe.metric_registry import total
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.models import ServedModels

# Running requests are large: only every fourth tick has them.
LIVE_INTERVAL_COUNT = 4


class LocalUpdates:
    """Updates of this API process, under a unique source id."""

    def __init__(self, clock: Clock, observation: Observation) -> None:
        self._clock = clock
        self._observation = observation
        self._source = random.getrandbits(63)

    def __call__(self, position: Position) -> Updates:
        snapshot, now_s = self._observation.snapshot(), self._clock.now()
        updates = request_updates(position, self._source, self._observation.records, now_s)
        updates.engines = (
            engine_updates(position, self._observation.steps, snapshot.engines, self._observation.names)
            if snapshot.engines
            else None
        )
        updates.routed, updates.breakers = routed_numbers(snapshot.numbers), snapshot.breakers
        return updates


class ConsoleReader:
    """Source of one feed's events. Its only state is its position."""

    def __init__(self, models: ServedModels, local: LocalUpdates, peer_queries: PeerQueries) -> None:
        self._models = models
        self._local = local
        self._peer_queries = peer_queries
        self._at = Position()
        self._count = 0
        self._engines: list[dict[str, Any]] = []

    def hello(self) -> dict[str, Any]:
        """Return the first event. Raises `ApiError` 503 while the engine is loading."""
        return hello(self._models)

    async def tick(self) -> dict[str, Any]:
        """Return the changes since the last tick."""
        position, at_s = self._at, time.time()
        updates = [self._local(position)]
        updates += map(decode_updates, await self._peer_queries.ask(TOPIC, encode(position)))
        engines = next((each.engines for each in updates if each.engines is not None), None)
        self._note(updates, engines)
        found, dropped = _requests(updates)
        return {
            "at": at_s,
            "steps": [] if engines is None else engines.steps.steps,
            "engines": self._engines,
            "router": _router(updates),
            "requests": found,
            "dropped": dropped,
        }

    def _note(self, updates: Iterable[Updates], engines: EngineUpdates | None) -> None:
        """Advance the position. Processes that did not answer keep theirs."""
        self._count += 1
        steps = self._at.steps
        if engines is not None:
            self._engines, steps = engines.engines, engines.steps.ever
        ended = self._at.ended | {each.source: each.ended for each in updates}
        self._at = Position(steps, ended, not self._count % LIVE_INTERVAL_COUNT)


def _requests(updates: Iterable[Updates]) -> tuple[list[orjson.Fragment], int]:
    """Return ended requests, then running ones, and the number of ended ones left out."""
    found = sorted(chain.from_iterable(each.requests for each in updates), key=lambda each: each.live)
    left_out = sum(not each.live for each in found[MAX_REQUESTS_PER_EVENT:])
    shown = [orjson.Fragment(each.record) for each in found[:MAX_REQUESTS_PER_EVENT]]
    return shown, left_out + sum(each.dropped for each in updates)


def _router(updates: list[Updates]) -> dict[str, Any] | None:
    routed = [each.routed for each in updates if each.routed is not None]
    return router_json(total(routed), chain.from_iterable(each.breakers for each in updates)) if routed else None
