"""Items of a stored response as clients see them. Each has an id that names its response."""

from collections.abc import Mapping
from typing import Any

from roseinfer.server.formats.responses.tools import KINDS
from roseinfer.server.response_store.records import StoredResponse

RESPONSE_PREFIX = "resp_"
# Prefixes of ids by type of item, as far as clients may compare them.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    **{kind.item: kind.prefix for kind in KINDS.values()},
    **{f"{kind.item}_output": f"{kind.prefix}o" for kind in KINDS.values()},
}
_OTHER_PREFIX = "item"


def input_items(record: StoredResponse) -> list[dict[str, Any]]:
    """Return the complete input, earlier responses first."""
    request_id = record.id.removeprefix(RESPONSE_PREFIX)
    return [_shown(item, f"{request_id}_i{index}") for index, item in enumerate(record.input())]


def conversation(record: StoredResponse) -> list[dict[str, Any]]:
    """Return the input and output, which a next response continues."""
    return input_items(record) + record.response["output"]


def response_of(item_id: str) -> str | None:
    """Return the id of the response in which an item was new, None if the id was not made here."""
    request_id = item_id.partition("_")[2].rpartition("_")[0]
    return RESPONSE_PREFIX + request_id if request_id else None


def _shown(item: dict[str, Any], id_end: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    own = item.get("id")
    id = own if isinstance(own, str) and own else f"{_PREFIXES.get(kind, _OTHER_PREFIX)}_{id_end}"
    shown = {**item, "type": kind, "id": id}
    return shown | {"status": "completed", "content": _parts(item)} if kind == "message" else shown


def _parts(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    if not isinstance(content, str):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
