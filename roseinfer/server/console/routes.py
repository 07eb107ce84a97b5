"""Routes of the console. They are not in the OpenAPI document because they change with the page."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.console.exchange import answer_queries
from roseinfer.server.console.feed import Feeds
from roseinfer.server.console.files import INDEX, ConsoleFiles
from roseinfer.server.console.reader import ConsoleReader, LocalUpdates
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.models import ServedModels

EVENTS = "/console/events"


def add(app: FastAPI, models: ServedModels, observation: Observation, peer_queries: PeerQueries) -> list[str]:
    """Add the routes and return the public paths, which hold no data of the server."""
    files = ConsoleFiles()
    feeds = Feeds(models.first.lifecycle)
    local = LocalUpdates(models.first.clock, observation)
    answer_queries(peer_queries, local)

    async def feed() -> Response:
        return feeds.answer(ConsoleReader(models, local, peer_queries))

    app.add_api_route(EVENTS, feed, response_class=Response, include_in_schema=False)
    public = {"/": INDEX, **{f"/console/{name}": name for name in files.names}}
    for path, name in public.items():
        app.add_route(path, _file(files, name), methods=["GET", "HEAD"], include_in_schema=False)
    return list(public)


def _file(files: ConsoleFiles, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return files.answer(name, request.headers)

    return answer
