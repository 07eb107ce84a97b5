"""The console's routes. None is in the OpenAPI document: they go with the page, and change with it."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.console.feed import Feeds
from roseinfer.server.console.files import INDEX, ConsoleFiles
from roseinfer.server.console.looking import Known, Look, tell
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.service import Service

EVENTS = "/console/events"


def add(app: FastAPI, service: Service, observation: Observation, peer_queries: PeerQueries) -> list[str]:
    """Returns the paths that hold nothing of this server."""
    files = ConsoleFiles()
    feeds = Feeds(service.lifecycle)
    known = Known(service, observation)
    tell(peer_queries, known)

    async def feed() -> Response:
        return feeds.answer(Look(service, known, peer_queries))

    app.add_api_route(EVENTS, feed, response_class=Response, include_in_schema=False)
    public = {"/": INDEX, **{f"/console/{name}": name for name in files.names}}
    for path, name in public.items():
        app.add_route(path, _file(files, name), methods=["GET", "HEAD"], include_in_schema=False)
    return list(public)


def _file(files: ConsoleFiles, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return files.answer(name, request.headers)

    return answer
