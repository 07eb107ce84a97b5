"""Routes of stored responses: GET and DELETE /v1/responses/{id}, input_items and cancel below it, and input_tokens."""

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.documents import docs
from roseinfer.server.formats.responses.document import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ResponseObject,
)
from roseinfer.server.formats.responses.earlier import MIN_THREAD_BYTES
from roseinfer.server.formats.responses.history import NO_STORE, History, store_errors
from roseinfer.server.formats.responses.request import FIELD_NAMES, ResponsesRequest, ResponsesTranslation
from roseinfer.server.formats.responses.stored_items import input_items
from roseinfer.server.formats.translated_job import count_prompt_tokens
from roseinfer.server.formats.unsupported import unsupported_error
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.server.request.models import ServedModels
from roseinfer.server.response_store.records import Key, StoredResponse
from roseinfer.server.response_store.shared import SharedResponses
from roseinfer.server.routes.query import limit_of, one_of, parameter

PATH = "/v1/responses"
# Ids may hold slashes, since clients may choose request ids.
_ONE = PATH + "/{response_id:path}"
NOT_FOUND = "not_found_error"
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
ORDERS = ("asc", "desc")


class ResponseEndpoints:
    """Endpoints of stored responses."""

    def __init__(self, models: ServedModels, history: History) -> None:
        self._models = models
        self._history = history

    async def count_input_tokens(self, request: Request) -> Response:
        async with self._models.preparing(request, ResponsesRequest) as (service, backend, wanted):
            whole = await self._history.whole(wanted, request.headers.raw, service.limits.max_body_bytes)
            chat = ResponsesTranslation(whole.request).chat
            tokens = await count_prompt_tokens(backend, chat, FIELD_NAMES)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve_response(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() == "true":
            raise unsupported_error("stream", "a response cannot be streamed again, ask for it until it has ended")
        return JsonResponse((await self._find(request, response_id)).response)

    async def list_input_items(self, request: Request, response_id: str) -> Response:
        asked = request.query_params
        limit = limit_of(asked.get("limit"), DEFAULT_LIMIT, MAX_LIMIT)
        order, after = one_of("order", asked.get("order"), ORDERS), asked.get("after")
        record = await self._find(request, response_id)

        def page() -> dict[str, Any]:
            items = input_items(record)
            return _page(items if order == "asc" else items[::-1], limit, after)

        large = record.size >= MIN_THREAD_BYTES
        return JsonResponse(await asyncio.to_thread(page) if large else page())

    async def delete_response(self, request: Request, response_id: str) -> Response:
        responses, key = self._stored(request, response_id)
        with store_errors():
            deleted = await responses.delete(key)
        if not deleted:
            raise _not_found(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        record = await self._find(request, response_id)
        if not record.response["background"]:
            raise bad_request("Only responses with background: true can be cancelled", "response_id", "not_background")
        responses, key = self._stored(request, response_id)
        with store_errors():
            ended = await responses.cancel(key)
        if ended is None:
            raise _not_found(response_id)
        return JsonResponse(ended.response)

    def _stored(self, request: Request, id: str) -> tuple[SharedResponses, Key]:
        if self._history.responses is None:
            raise _not_found(id, f": {NO_STORE}")
        return self._history.responses, Key(self._history.owner(request.headers.raw), id)

    async def _find(self, request: Request, id: str) -> StoredResponse:
        _, key = self._stored(request, id)
        record = await self._history.find(key)
        if record is None:
            raise _not_found(id)
        return record


async def compact(request: Request) -> Response:
    """Reject a compaction. `compact` would otherwise be an id, for which POST is a wrong method."""
    instead = "ask for a summary with POST /v1/responses"
    raise ApiError(404, f"unknown path {PATH}/compact: inputs are not compacted here; {instead}", type=NOT_FOUND)


def add(app: FastAPI, models: ServedModels, history: History) -> None:
    endpoints = ResponseEndpoints(models, history)

    def route(path: str, endpoint: Any, method: str, answer: Any, *errors: int, **more: Any) -> None:
        described = docs(answer, *errors, body=more.pop("body", None))
        described["openapi_extra"] |= more
        app.add_api_route(path, endpoint, methods=[method], tags=["responses"], **described)

    errors = (400, 401, 404, 408, 413, 503)
    route(f"{PATH}/input_tokens", endpoints.count_input_tokens, "POST", InputTokenCount, *errors, body=ResponsesRequest)
    route(
        f"{_ONE}/input_items", endpoints.list_input_items, "GET", ItemList, 400, 401, 404, 503, parameters=_PARAMETERS
    )
    route(f"{_ONE}/cancel", endpoints.cancel_response, "POST", ResponseObject, 400, 401, 404, 503)
    app.add_api_route(f"{PATH}/compact", compact, methods=["POST"], include_in_schema=False)
    route(_ONE, endpoints.retrieve_response, "GET", ResponseObject, 400, 401, 404, 503)
    route(_ONE, endpoints.delete_response, "DELETE", DeletedResponse, 401, 404, 503)


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    start = 0
    if after is not None:
        start = 1 + next((index for index, item in enumerate(items) if item["id"] == after), -1)
        if not start:
            raise bad_request(f"after: Item with id {after[:100]!r} not found", "after")
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


_PARAMETERS = [
    parameter("limit", "how many at most", type="integer", minimum=1, maximum=MAX_LIMIT, default=DEFAULT_LIMIT),
    parameter("order", "the first or the last items first", type="string", enum=list(ORDERS), default="desc"),
    parameter("after", "id of the item before the first", type="string"),
]


def _not_found(id: str, why: str = "") -> ApiError:
    message = f"Response with id {id[:100]!r} not found{why}"
    return ApiError(404, message, type=NOT_FOUND, param="response_id", code="response_not_found")
