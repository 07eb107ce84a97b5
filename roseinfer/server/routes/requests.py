"""GET /v1/requests and /v1/requests/{id}: what became of the last requests, and how those do that run."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.documents import docs
from roseinfer.server.formats.request_document import RequestList, RequestState
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.server.observe.records import RING, RequestRecords
from roseinfer.server.observe.telling import record_json
from roseinfer.server.request.service import Service

DEFAULT_LIMIT = 100
STATES = ("live", "ended")


def add(app: FastAPI, service: Service, records: RequestRecords) -> None:
    async def list_requests(request: Request) -> Response:
        limit, state = _limit(request.query_params.get("limit")), _state(request.query_params.get("state"))
        found = records.newest(limit, service.clock.now(), live=state != "ended", ended=state != "live")
        return JsonResponse({"object": "list", "data": [record_json(record) for record in found]})

    async def retrieve_request(request_id: str) -> Response:
        record = records.find(request_id, service.clock.now())
        if record is None:
            raise _unknown(request_id)
        return JsonResponse(record_json(record))

    described = docs(RequestList, 400, 401, 503)
    described["openapi_extra"] = {"parameters": _PARAMETERS}
    app.add_api_route("/v1/requests", list_requests, tags=["requests"], **described)
    # An id that a client gave may hold slashes.
    described = docs(RequestState, 401, 404, 503)
    app.add_api_route("/v1/requests/{request_id:path}", retrieve_request, tags=["requests"], **described)


_PARAMETERS = [
    {
        "name": "limit",
        "in": "query",
        "description": "how many at most, the newest first",
        "schema": {"type": "integer", "minimum": 1, "maximum": RING, "default": DEFAULT_LIMIT},
    },
    {
        "name": "state",
        "in": "query",
        "description": "only those that run, or only those that have ended",
        "schema": {"type": "string", "enum": list(STATES)},
    },
]


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= RING):
        raise bad_request(f"limit must be within [1, {RING}], got {text[:20]!r}", "limit")
    return int(text)


def _state(text: str | None) -> str | None:
    if text is not None and text not in STATES:
        raise bad_request(f"state must be one of {', '.join(STATES)}, got {text[:20]!r}", "state")
    return text


def _unknown(request_id: str) -> ApiError:
    message = f"No request {request_id[:100]!r} is known: the server remembers the last {RING} of each of its processes"
    return ApiError(404, message, type="not_found_error", param="request_id", code="request_not_found")
