"""One reader's look at the whole server: what is new in all of its processes since its last one."""

import random
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec
import orjson

from roseinfer.server.console.events import hello
from roseinfer.server.console.news import (
    MAX_REQUESTS_TOLD,
    Machine,
    News,
    Since,
    machine_news,
    request_news,
    routed_news,
    router_json,
)
from roseinfer.server.console.steps import Kept
from roseinfer.server.observe.metric_registry import total
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.report import EngineOwner, Observation
from roseinfer.server.request.service import Service

TOPIC = "console"
# How requests do that run is much to tell: only one look of so many asks for it.
LIVE_EVERY = 4

_encode = msgspec.msgpack.Encoder().encode
_since = msgspec.msgpack.Decoder(Since).decode
_news = msgspec.msgpack.Decoder(News).decode


def tell(peer_queries: PeerQueries, known: Callable[[Since], News]) -> None:
    """Have those be told what is `known` here who ask for their readers."""
    peer_queries.on(TOPIC, lambda body: _encode(known(_since(body))))


def tell_of_machine(peer_queries: PeerQueries, kept: Kept, owner: EngineOwner) -> None:
    """For who owns the engines, and answers no requests."""
    tell(peer_queries, lambda since: News(machine_news(since, kept, owner.reports())))


class Known:
    """What this process knows that answers requests, under a name that no other has."""

    def __init__(self, service: Service, observation: Observation) -> None:
        self._service = service
        self._observation = observation
        self._source = random.getrandbits(63)

    def __call__(self, since: Since) -> News:
        seen, now_s = self._observation.snapshot(), self._service.clock.now()
        news = request_news(since, self._source, self._observation.records, now_s)
        news.machine = machine_news(since, self._observation.steps, seen.engines) if seen.engines else None
        news.routed, news.breakers = routed_news(seen.numbers), seen.breakers
        return news


class Look:
    """See `feed.Reader`. Nothing is kept for it but how far it has got."""

    def __init__(self, service: Service, known: Known, peer_queries: PeerQueries) -> None:
        self._service = service
        self._known = known
        self._peer_queries = peer_queries
        self._seen = Since()
        self._count = 0
        self._engines: list[dict[str, Any]] = []

    def hello(self) -> dict[str, Any]:
        return hello(self._service)

    async def tick(self) -> dict[str, Any]:
        since, at_s = self._seen, time.time()
        news = [self._known(since)]
        news += map(_news, await self._peer_queries.ask(TOPIC, _encode(since)))
        machine = next((each.machine for each in news if each.machine is not None), None)
        self._note(news, machine)
        told, dropped = _requests(news)
        return {
            "at": at_s,
            "steps": [] if machine is None else machine.steps.steps,
            "engines": self._engines,
            "router": _router(news),
            "requests": told,
            "dropped": dropped,
        }

    def _note(self, news: Iterable[News], machine: Machine | None) -> None:
        """What is told now. Who was too busy to answer goes on where it was."""
        self._count += 1
        steps = self._seen.steps
        if machine is not None:
            self._engines, steps = machine.engines, machine.steps.ever
        ended = self._seen.ended | {each.source: each.ended for each in news}
        self._seen = Since(steps, ended, not self._count % LIVE_EVERY)


def _requests(news: Iterable[News]) -> tuple[list[orjson.Fragment], int]:
    """Those that have ended before those that run, and how many that have ended are left out."""
    told = sorted(chain.from_iterable(each.requests for each in news), key=lambda each: each.live)
    left_out = sum(not each.live for each in told[MAX_REQUESTS_TOLD:])
    shown = [orjson.Fragment(each.record) for each in told[:MAX_REQUESTS_TOLD]]
    return shown, left_out + sum(each.dropped for each in news)


def _router(news: list[News]) -> dict[str, Any] | None:
    routed = [each.routed for each in news if each.routed is not None]
    return router_json(total(routed), chain.from_iterable(each.breakers for each in news)) if routed else None
