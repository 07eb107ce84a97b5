"""Content blocks of messages as messages of a chat.

Histories may hold blocks that Anthropic's server made. Their readable parts are shown to the model. Blocks without
content for the model are left out, with a warning. Blocks with content that only that server can read are refused.
"""

from typing import Any

from orjson import dumps

from roseinfer.server.formats.chat_builder import ChatBuilder, check_nesting, text_field, texts_of
from roseinfer.server.formats.messages.tools import CHANGES, MessageTools
from roseinfer.server.http.errors import ApiError, bad_request

TEXT = {"text": "text"}
# All tools are shown to the model, so the name of one that a search found is enough.
_RESULT_PARTS = {"text": "text", "tool_reference": "tool_name"}
# Types of a document's source -> the field with its text or its blocks of text.
_SOURCES = {"text": "data", "content": "content"}
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_SERVERS_RESULT = "_tool_result"
_LEFT_OUT = frozenset({"redacted_thinking", "fallback", "mcp_tool_listing"})
# Start of the first system block of Claude Code, which is for Anthropic's billing. It differs in each session, so with
# it no session would find another's prefix in the cache.
_BILLING = "x-anthropic-billing-header:"


def system_texts(system: str | list[dict[str, Any]]) -> list[str]:
    """Return the texts of a system prompt, without the billing block. Raises `ApiError` 400."""
    texts = texts_of(system, TEXT, "system", "system")
    return texts[1:] if isinstance(system, list) and texts and _is_billing(texts[0]) else texts


def _is_billing(text: str) -> bool:
    return text.startswith(_BILLING) and "\n" not in text.rstrip()


class Content:
    """Reader of content blocks into the messages of a chat. `warnings`: parts that are left out.

    Changes of tools are applied to `offered`.
    """

    def __init__(self, chat: ChatBuilder, offered: MessageTools) -> None:
        self.warnings: dict[str, None] = {}
        self._chat = chat
        self._offered = offered

    def add(self, role: str, block: dict[str, Any], place: str) -> None:
        """Add the block at `place`. Raises `ApiError` 400 that names the place."""
        block = self._plain(block, place) if role == "user" else block
        kind = block.get("type")
        if kind == "text":
            self._add_text(role, text_field(block, "text", place, "messages"))
        elif kind == "tool_result" and role == "user":
            self._add_result(block, place)
        elif role == "system" and isinstance(kind, str) and kind in CHANGES:
            self._offered.change(block, place)
        elif role == "assistant" and isinstance(kind, str):
            self._add_answered(kind, block, place)
        else:
            raise _unsupported(kind, role, place)

    def _add_text(self, role: str, text: str) -> None:
        if role == "assistant":
            self._chat.add_answer([text])
        else:
            self._chat.add_text(role, [text])

    def _add_answered(self, kind: str, block: dict[str, Any], place: str) -> None:
        """Add a block that only an assistant has."""
        if kind in _CALLS:
            self._add_call(block, place)
        elif kind == "thinking":
            self._chat.add_reasoning(text_field(block, "thinking", place, "messages"))
        elif kind in _LEFT_OUT:
            self.warnings[f"messages: blocks of type {kind!r} are left out"] = None
        elif kind == "compaction":
            self._add_compaction(block, place)
        elif kind.endswith(_SERVERS_RESULT):
            self._add_servers_result(block, place)
        else:
            raise _unsupported(kind, "assistant", place)

    def _add_compaction(self, block: dict[str, Any], place: str) -> None:
        """Add a summary, and the changes of tools that it stands for. One that failed has no content."""
        if block.get("content") is not None:
            self._chat.add_answer([text_field(block, "content", place, "messages")])
        elif block.get("encrypted_content"):
            raise _unsupported("compaction", "assistant", place)
        else:
            self.warnings["messages: blocks of type 'compaction' without content are left out"] = None
        changes = block.get("tool_changes")
        changes = [] if changes is None else changes
        if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
            raise bad_request(f"{place}.tool_changes must be a list of blocks", "messages")
        for index, change in enumerate(changes):
            self._offered.change(change, f"{place}.tool_changes.{index}")

    def _add_call(self, block: dict[str, Any], place: str) -> None:
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise bad_request(f"{place}.input must be an object", "messages")
        call_id, name = (text_field(block, field, place, "messages") for field in ("id", "name"))
        self._chat.add_call(call_id, name, arguments)

    def _add_result(self, block: dict[str, Any], place: str) -> None:
        content = block.get("content")
        if isinstance(content, list):
            content = [self._plain(part, f"{place}.content.{index}") for index, part in enumerate(content)]
        texts = [] if content is None else texts_of(content, _RESULT_PARTS, f"{place}.content", "messages")
        self._chat.add_result(text_field(block, "tool_use_id", place, "messages"), texts)
        if block.get("is_error"):
            self.warnings["messages.content.is_error"] = None

    def _plain(self, block: Any, place: str) -> Any:
        """Return a document or a search result as a block of text; others unchanged."""
        if not isinstance(block, dict) or block.get("type") not in ("document", "search_result"):
            return block
        cited = block.get("citations")
        if isinstance(cited, dict) and cited.get("enabled"):
            self.warnings["messages.content.citations"] = None
        return {"type": "text", "text": _document_text(block, place)}

    def _add_servers_result(self, block: dict[str, Any], place: str) -> None:
        """Add the result of a tool that Anthropic's server ran: its texts, or its readable parts as JSON."""
        content = block.get("content")
        check_nesting(content, "messages")
        if isinstance(content, str):
            texts = [content]
        elif _has_texts_alone(content):
            texts = texts_of(content, TEXT, f"{place}.content", "messages")
        else:
            texts = [dumps(_readable(content, f"{place}.content")).decode()]
        self._chat.add_result(text_field(block, "tool_use_id", place, "messages"), texts)


def _document_text(block: dict[str, Any], place: str) -> str:
    """Return what is known of a document or a search result, and its texts. Raises `ApiError` 400 for files."""
    source, about = block.get("source"), [block.get("title"), block.get("context")]
    if block["type"] == "search_result":
        body, field = block.get("content"), "content"
        about = [block.get("title"), source]
    else:
        kind = source.get("type") if isinstance(source, dict) else None
        if not isinstance(source, dict) or not isinstance(kind, str) or kind not in _SOURCES:
            raise _unsupported("document", "user", place)
        body, field = source.get(_SOURCES[kind]), f"source.{_SOURCES[kind]}"
    texts = texts_of(body, TEXT, f"{place}.{field}", "messages")
    return "\n".join([text for text in about if isinstance(text, str)] + texts)


def _has_texts_alone(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content)


def _readable(value: Any, place: str) -> Any:
    """Return `value` without encrypted fields. Raises `ApiError` 400 for images and files."""
    if isinstance(value, list):
        return [_readable(part, place) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("base64", "image"):
        message = f"{place}: parts of type {value['type']!r} are not supported"
        raise bad_request(message, "messages", "unsupported_content")
    return {name: _readable(part, place) for name, part in value.items() if not name.startswith("encrypted_")}


def _unsupported(kind: Any, role: str, place: str) -> ApiError:
    message = f"{place}: blocks of type {str(kind)[:40]!r} are not supported in messages of the role {role!r}"
    return bad_request(message, "messages", "unsupported_content")
