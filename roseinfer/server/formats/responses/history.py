"""Stored responses as requests use them: those that they continue, and their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson

from roseinfer.server.formats.chat_builder import check_nesting
from roseinfer.server.formats.responses.earlier import EarlierItems, is_reference
from roseinfer.server.formats.responses.request import ResponsesRequest
from roseinfer.server.formats.unsupported import unsupported_error
from roseinfer.server.http.api_keys import Headers, key_digest
from roseinfer.server.http.errors import ApiError, bad_request, unavailable
from roseinfer.server.response_store.records import Key, StoredResponse, StoreFailedError
from roseinfer.server.response_store.shared import RunningResponse, SharedResponses

STORE_RETRY_S = 1.0
# What a stored response takes beside its input, roughly: its other fields, and each token of its output.
_FIELDS_BYTES, _TOKEN_BYTES = 2048, 8
NO_STORE = "this server stores no responses (--response-store)"


class Whole(NamedTuple):
    """Request with its complete input, of about `size` bytes."""

    request: ResponsesRequest
    size: int


class Keeper:
    """Writer of the states of one response. `items`: its complete input, of about `size` bytes."""

    def __init__(self, responses: SharedResponses, owner: str, items: list[dict[str, Any]], size: int) -> None:
        self._responses = responses
        self._owner = owner
        self._items = items
        self._size = size

    def __call__(self, response: dict[str, Any]) -> None:
        self._responses.store.put(self._record(response))

    async def begin(self, response: dict[str, Any]) -> RunningResponse:
        """Store the first state of a response that runs in the background. Return when it is in the file.

        Raises `ApiError` 503 if it could not be stored.
        """
        record = self._record(response)
        running = self._responses.begin(record)
        try:
            with store_errors():
                await self._responses.store.written()
                if await self._responses.store.get(record.key) is None:
                    raise StoreFailedError("the first state of a background response was not stored")
        except ApiError:
            running.drop()
            raise
        except BaseException:  # the server ends
            running.fail_with_server("The server ended before this response ran")
            raise
        return running

    def _record(self, response: dict[str, Any]) -> StoredResponse:
        usage = response["usage"]
        size = self._size + _FIELDS_BYTES + (usage["output_tokens"] * _TOKEN_BYTES if usage else 0)
        return StoredResponse(self._owner, response["id"], response, self._items, size=size)


class History:
    """Access of requests to stored responses. `responses` None: none are stored. `keyed`: they belong to API keys."""

    def __init__(self, responses: SharedResponses | None = None, keyed: bool = False) -> None:
        self.responses = responses
        self._keyed = keyed

    def owner(self, headers: Headers) -> str:
        return key_digest(headers) if self._keyed else ""

    # --- requests -----------------------------------------------------------------------------------------------
    async def whole(self, request: ResponsesRequest, headers: Headers, max_bytes: int) -> Whole:
        """Put stored items into the input. `max_bytes`: limit for the whole conversation.

        Raises `ApiError` 400, 404 or 503.
        """
        check_nesting(request.input, "input")
        self._check(request)
        size = _body_bytes(headers, request.input)
        refers = not isinstance(request.input, str) and any(map(is_reference, request.input))
        if request.previous_response_id is None and not refers:
            return Whole(request, size)
        if self.responses is None:
            raise unsupported_error("previous_response_id" if request.previous_response_id else "input", NO_STORE)
        owner = self.owner(headers)
        earlier = EarlierItems(lambda id: self.find(Key(owner, id)), size, max_bytes)
        before = [] if request.previous_response_id is None else await earlier.of_previous(request.previous_response_id)
        given = as_items(request.input)
        given = await earlier.resolved(given) if refers else given
        return Whole(request.continuing(before, given), earlier.size)

    def _check(self, request: ResponsesRequest) -> None:
        if not request.background:
            return
        if self.responses is None:
            raise unsupported_error("background", NO_STORE)
        if request.store is False:
            message = "background: true needs store: true, for the response to be asked for later"
            raise bad_request(message, "background")

    async def find(self, key: Key) -> StoredResponse | None:
        """Return a stored response. Raises `ApiError` 503 if the store fails."""
        assert self.responses is not None, "checked before"
        with store_errors():
            return await self.responses.find(key)

    # --- answers ------------------------------------------------------------------------------------------------
    def keeper(self, whole: Whole, headers: Headers) -> Keeper | None:
        """Return what stores the answer, None if it is not to be stored."""
        if self.responses is None or whole.request.store is False:
            return None
        return Keeper(self.responses, self.owner(headers), as_items(whole.request.input), whole.size)

    def warnings(self, request: ResponsesRequest) -> list[str]:
        """Return the names of fields that are not honoured."""
        return ["store"] if request.store and self.responses is None else []


def as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _body_bytes(headers: Headers, given: str | list[dict[str, Any]]) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return len(orjson.dumps(given))  # it came in chunks


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise failures of the store as `ApiError` 503."""
    try:
        yield
    except StoreFailedError as error:
        message = "The stored responses cannot be read or changed at the moment"
        raise unavailable("response_store_failed", message, STORE_RETRY_S) from error
