"""What requests refer to of earlier responses, and what is stored of theirs."""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from roseinfer.server.formats.as_chat import text_field, unsupported
from roseinfer.server.formats.responses.request import ResponsesRequest
from roseinfer.server.formats.responses.stored_items import conversation, response_of
from roseinfer.server.http.auth import key_digest
from roseinfer.server.http.errors import ApiError, bad_request, unavailable
from roseinfer.server.request.job import Job
from roseinfer.server.response_store.records import Key, StoredResponse, StoreFailedError
from roseinfer.server.response_store.shared import RunningResponse, SharedResponses

# Responses whose items one request may refer to.
MAX_REFERENCED_RESPONSES = 64
STORE_RETRY_S = 1.0
# What a stored response takes of memory while it waits to be written, roughly.
_BYTES_PER_TOKEN = 8
_RESPONSE_BYTES = 4096
NO_STORE = "this server stores no responses (--response-store)"

Headers = Iterable[tuple[bytes, bytes]]


class Keeper:
    """Stores the states of one response. `items`: its whole input."""

    def __init__(self, responses: SharedResponses, owner: str, items: list[dict[str, Any]], size_hint: int) -> None:
        self._responses = responses
        self._owner = owner
        self._items = items
        self._size_hint = size_hint

    def __call__(self, response: dict[str, Any]) -> None:
        self._responses.store.put(self._record(response), self._size_hint)

    async def begin(self, response: dict[str, Any]) -> RunningResponse:
        """For a response whose states are stored while it runs. Return when the first is in the file."""
        running = self._responses.begin(self._record(response), self._size_hint)
        try:
            await self._responses.written()
        except BaseException:  # the server ends
            running.fail("server_error", "The server ended before this response ran")
            raise
        return running

    def _record(self, response: dict[str, Any]) -> StoredResponse:
        return StoredResponse(self._owner, response["id"], response, self._items)


class History:
    """`responses` None: none are stored. `keyed`: whether the server has API keys, which then own what is stored."""

    def __init__(self, responses: SharedResponses | None = None, keyed: bool = False) -> None:
        self.responses = responses
        self._keyed = keyed

    def owner(self, headers: Headers) -> str:
        return key_digest(headers) if self._keyed else ""

    # --- requests -----------------------------------------------------------------------------------------------
    async def whole(self, request: ResponsesRequest, headers: Headers) -> ResponsesRequest:
        """The request with all of its input written out. Raises `ApiError` 400, 404 or 503."""
        self._check(request)
        refers = not isinstance(request.input, str) and any(map(_is_reference, request.input))
        if request.previous_response_id is None and not refers:
            return request
        if self.responses is None:
            raise unsupported("previous_response_id" if request.previous_response_id else "input", NO_STORE)
        owner = self.owner(headers)
        earlier = [] if request.previous_response_id is None else await self._earlier(owner, request)
        given = as_items(request.input)
        if refers:
            given = await self._resolved(owner, given)
        return request.model_copy(update={"input": earlier + given})

    def _check(self, request: ResponsesRequest) -> None:
        if not request.background:
            return
        if self.responses is None:
            raise unsupported("background", NO_STORE)
        if request.store is False:
            raise bad_request(
                "background: true needs store: true, for the response to be asked for later", "background"
            )

    async def _earlier(self, owner: str, request: ResponsesRequest) -> list[dict[str, Any]]:
        id = request.previous_response_id or ""
        found = await self.find(Key(owner, id))
        if found is None:
            message = f"Previous response with id {id[:100]!r} not found"
            raise bad_request(message, "previous_response_id", "previous_response_not_found")
        if found.running:
            message = f"Previous response with id {id[:100]!r} is still {found.response['status']}"
            raise bad_request(message, "previous_response_id", "previous_response_not_finished")
        return conversation(found)

    async def _resolved(self, owner: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`items` with what they refer to in place of references."""
        known: dict[Any, dict[str, Any]] = {}
        read: set[str] = set()
        # The last first: its response has a copy of what was said before, so that one is often enough.
        for index, item in reversed(list(enumerate(items))):
            if not _is_reference(item):
                continue
            id = text_field(item, "id", f"input.{index}", "input")
            response = response_of(id)
            if id not in known and response is not None and response not in read:
                if len(read) == MAX_REFERENCED_RESPONSES:
                    message = f"input refers to items of more than {MAX_REFERENCED_RESPONSES} responses"
                    raise bad_request(message, "input")
                read.add(response)
                record = await self.find(Key(owner, response))
                known |= {} if record is None else {each["id"]: each for each in conversation(record)}
            if id not in known:
                message = f"input.{index}: Item with id {id[:100]!r} not found"
                raise ApiError(404, message, param="input", code="item_not_found")
        return [known[item["id"]] if _is_reference(item) else item for item in items]

    async def find(self, key: Key) -> StoredResponse | None:
        """Raises `ApiError` 503 if the store fails."""
        assert self.responses is not None, "checked before"
        try:
            return await self.responses.find(key)
        except StoreFailedError as error:
            raise store_failed() from error

    # --- answers ------------------------------------------------------------------------------------------------
    def keeper(self, request: ResponsesRequest, job: Job, headers: Headers) -> Keeper | None:
        """None: the answer is not stored. `request`: as `whole` returned it."""
        if self.responses is None or request.store is False:
            return None
        items = as_items(request.input)
        # Of a long conversation most is in the prompt; what is not has come in the body.
        size_hint = _RESPONSE_BYTES + _BYTES_PER_TOKEN * len(job.prompts[0].ids) + _body_bytes(headers, items)
        return Keeper(self.responses, self.owner(headers), items, size_hint)

    def warnings(self, request: ResponsesRequest) -> list[str]:
        """What was asked for and is not done."""
        return ["store"] if request.store and self.responses is None else []


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _body_bytes(headers: Headers, items: list[dict[str, Any]]) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    try:
        return len(orjson.dumps(items))  # it came in chunks
    except orjson.JSONEncodeError:  # too deep to be stored
        return 0


def _is_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "item_reference"


def store_failed() -> ApiError:
    message = "The stored responses cannot be read just now"
    return unavailable("response_store_failed", message, STORE_RETRY_S)
