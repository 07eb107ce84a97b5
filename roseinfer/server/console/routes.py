"""The console's routes. None is in the OpenAPI document: they go with the page, and change with it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.console import events
from roseinfer.server.console.feed import Feeds
from roseinfer.server.console.files import INDEX, ConsoleFiles
from roseinfer.server.console.steps import steps_since
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.service import Service

# In one tick: a reader that has missed more sees the newest.
TICK_STEPS = 600
EVENTS = "/console/events"


def add(app: FastAPI, service: Service, observation: Observation) -> list[str]:
    """Returns the paths that hold nothing of this server."""
    files = ConsoleFiles()
    feeds = Feeds(service.lifecycle)

    async def feed() -> Response:
        return feeds.answer(_Local(service, observation))

    app.add_api_route(EVENTS, feed, response_class=Response, include_in_schema=False)
    public = {"/": INDEX, **{f"/console/{name}": name for name in files.names}}
    for path, name in public.items():
        app.add_route(path, _file(files, name), methods=["GET", "HEAD"], include_in_schema=False)
    return list(public)


def _file(files: ConsoleFiles, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return files.answer(name, request.headers)

    return answer


class _Local:
    """A `Reader` of what this process knows."""

    def __init__(self, service: Service, observation: Observation) -> None:
        self._service = service
        self._observation = observation
        self._seen = 0

    def hello(self) -> dict[str, Any]:
        return events.hello(self._service)

    async def tick(self) -> dict[str, Any]:
        new = steps_since(self._observation.steps, self._seen, TICK_STEPS)
        first, self._seen = not self._seen, new.ever
        return {
            "at": time.time(),
            "steps": new.steps,
            "engines": events.engines(self._observation.snapshot().engines),
            "router": None,
            "requests": [],
            "dropped": 0 if first else new.dropped,
        }
