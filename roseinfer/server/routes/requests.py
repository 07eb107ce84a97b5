"""GET /v1/requests and /v1/requests/{id}: running and recently ended requests.

Each API process keeps records of its own requests. The one that answers queries the others.
"""

from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.documents import docs
from roseinfer.server.formats.request_document import RequestList, RequestState
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.errors import ApiError
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.record_json import record_json
from roseinfer.server.observe.records import MAX_ENDED_RECORDS, RequestEntry, RequestRecords, ended_s
from roseinfer.server.request.models import ServedModels
from roseinfer.server.routes.query import limit_of, one_of, parameter

DEFAULT_LIMIT = 100
STATES = ("live", "ended")
_TOPIC = "requests"


class RecordQuery(NamedTuple):
    """Query between processes: the request with `id`, else the newest `limit` requests in `state` (None = any)."""

    limit: int
    state: str | None = None
    id: str | None = None


class FoundRecord(NamedTuple):
    """Record of one process. `live` and `at_s` are the sort key over all processes."""

    live: bool
    at_s: float
    record: dict[str, Any]


def add(app: FastAPI, models: ServedModels, records: RequestRecords, peer_queries: PeerQueries) -> None:
    def own(wanted: RecordQuery) -> list[FoundRecord]:
        now_s, state = models.first.clock.now(), wanted.state
        if wanted.id is not None:
            one = records.find(wanted.id, now_s)
            return [] if one is None else [_found(one)]
        return list(map(_found, records.newest(wanted.limit, now_s, live=state != "ended", ended=state != "live")))

    def tell(body: bytes) -> bytes:
        return msgspec.json.encode(own(msgspec.json.decode(body, type=RecordQuery)))

    async def newest(wanted: RecordQuery) -> list[dict[str, Any]]:
        """Return records of all processes. Raises `ApiError` 503 while every engine is loading."""
        models.loaded()
        found = own(wanted)
        for answer in await peer_queries.ask(_TOPIC, msgspec.json.encode(wanted)):
            found += msgspec.json.decode(answer, type=list[FoundRecord])
        found.sort(key=lambda one: one[:2], reverse=True)
        return [one.record for one in found[: wanted.limit]]

    async def list_requests(request: Request) -> Response:
        asked = request.query_params
        limit = limit_of(asked.get("limit"), DEFAULT_LIMIT, MAX_ENDED_RECORDS)
        wanted = RecordQuery(limit, one_of("state", asked.get("state"), STATES))
        return JsonResponse({"object": "list", "data": await newest(wanted)})

    async def retrieve_request(request_id: str) -> Response:
        found = await newest(RecordQuery(1, id=request_id))
        if not found:
            raise _unknown(request_id)
        return JsonResponse(found[0])

    peer_queries.on(_TOPIC, tell)
    described = docs(RequestList, 400, 401, 503)
    described["openapi_extra"] = {"parameters": _PARAMETERS}
    app.add_api_route("/v1/requests", list_requests, tags=["requests"], **described)
    # Ids of clients may contain slashes.
    described = docs(RequestState, 401, 404, 503)
    app.add_api_route("/v1/requests/{request_id:path}", retrieve_request, tags=["requests"], **described)


def _found(record: RequestEntry) -> FoundRecord:
    return FoundRecord(record.live, record.created_s if record.live else ended_s(record), record_json(record))


_LIMIT = "maximum number; running requests first, then ended ones, newest first"
_PARAMETERS = [
    parameter("limit", _LIMIT, type="integer", minimum=1, maximum=MAX_ENDED_RECORDS, default=DEFAULT_LIMIT),
    parameter("state", "only running (live) or only ended requests", type="string", enum=list(STATES)),
]


def _unknown(request_id: str) -> ApiError:
    message = f"Unknown request {request_id[:100]!r}: each server process keeps its last {MAX_ENDED_RECORDS} requests"
    return ApiError(404, message, type="not_found_error", param="request_id", code="request_not_found")
