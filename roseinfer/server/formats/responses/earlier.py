"""Items of stored responses that one request refers to, read within the bounds of a body."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from roseinfer.server.formats.chat_builder import text_field
from roseinfer.server.formats.responses.stored_items import conversation, response_of
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.server.response_store.records import StoredResponse

# Responses whose items one request may refer to.
MAX_REFERENCED_RESPONSES = 64
# Larger responses are decoded in a thread, since the event loop serves other requests.
MIN_THREAD_BYTES = 2**18


class EarlierItems:
    """Reader of stored items for one request. `find` looks a response up by its id. `size`: bytes of the request's
    body; those of the responses that are read are added, and the sum is at most `max_bytes`.
    """

    def __init__(self, find: Callable[[str], Awaitable[StoredResponse | None]], size: int, max_bytes: int) -> None:
        self.size = size
        self._find = find
        self._max_bytes = max_bytes

    async def of_previous(self, id: str) -> list[dict[str, Any]]:
        """Return the input and output of a response. Raises `ApiError` 400."""
        param = "previous_response_id"
        found = await self._find(id)
        if found is None:
            raise bad_request(f"Previous response with id {id[:100]!r} not found", param, "previous_response_not_found")
        if found.running:
            message = f"Previous response with id {id[:100]!r} is still {found.response['status']}"
            raise bad_request(message, param, "previous_response_not_finished")
        return await self._items(found, param)

    async def resolved(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `items` with references replaced by the items themselves. Raises `ApiError` 400 or 404."""
        known: dict[Any, dict[str, Any]] = {}
        read: set[str] = set()
        # The last first: its response has a copy of what was said before, so that one is often enough.
        for index, item in reversed(list(enumerate(items))):
            if not is_reference(item):
                continue
            id = text_field(item, "id", f"input.{index}", "input")
            response = response_of(id)
            if id not in known and response is not None and response not in read:
                read.add(response)
                if len(read) > MAX_REFERENCED_RESPONSES:
                    message = f"input refers to items of more than {MAX_REFERENCED_RESPONSES} responses"
                    raise bad_request(message, "input")
                record = await self._find(response)
                found = [] if record is None else await self._items(record, "input")
                known |= {each["id"]: each for each in found}
            if id not in known:
                message = f"input.{index}: Item with id {id[:100]!r} not found"
                raise ApiError(404, message, param="input", code="item_not_found")
        return [known[item["id"]] if is_reference(item) else item for item in items]

    async def _items(self, record: StoredResponse, param: str) -> list[dict[str, Any]]:
        self.size += record.size
        if self.size > self._max_bytes:
            message = f"{param}: the conversation has more than {self._max_bytes} bytes"
            raise bad_request(message, param, "conversation_too_large")
        if record.size < MIN_THREAD_BYTES:
            return conversation(record)
        return await asyncio.to_thread(conversation, record)


def is_reference(item: Mapping[str, Any]) -> bool:
    """True for an `item_reference`, whose type clients may leave out."""
    return item.get("type") == "item_reference" or (item.get("type") is None and item.keys() - {"type"} == {"id"})
