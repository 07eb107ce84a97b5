"""Messages of a chat, built from another API's request, and checks of what that contains."""

from collections.abc import Callable, Mapping
from typing import Any

from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import check_depth
from roseinfer.server.http.errors import bad_request


class ChatBuilder:
    """Builder of a chat's messages. An assistant's message has reasoning, then text, then tool calls."""

    def __init__(self) -> None:
        # Contents and reasoning are lists of texts until `messages` joins them.
        self._messages: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """Return the finished messages. Add nothing afterwards."""
        for message in self._messages:
            message["content"] = _parts(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
            if message["role"] == "assistant" and "tool_calls" not in message and message["content"] is None:
                message["content"] = ""  # such as an answer cut during its reasoning
        return self._messages

    def add_text(self, role: str, texts: list[str]) -> None:
        """Add texts of system, developer or user; consecutive texts of one role are one message."""
        last = self._messages[-1] if self._messages else None
        if last is not None and last["role"] == role:
            last["content"] += texts
        else:
            self._messages.append({"role": role, "content": list(texts)})

    def add_reasoning(self, text: str) -> None:
        message = self._assistant(lambda said: not said["content"] and "tool_calls" not in said)
        message.setdefault("reasoning_content", []).append(text)

    def add_answer(self, texts: list[str]) -> None:
        self._assistant(lambda said: "tool_calls" not in said)["content"] += texts

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant(lambda said: True).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, texts: list[str]) -> None:
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": texts or [""]})

    def _assistant(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or not fits(last):
            last = {"role": "assistant", "content": []}
            self._messages.append(last)
        return last


def _parts(texts: list[str]) -> str | list[dict[str, str]] | None:
    """Return a content. Several texts stay separate parts: the template joins them."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else None


def texts_of(content: Any, kinds: Mapping[str, str], place: str, param: str) -> list[str]:
    """Return the texts of a content. `kinds`: type of a part -> its field with the text. Raises `ApiError` 400."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request(f"{place} must be a string or a list of parts", param)
    return [_text_of(part, kinds, f"{place}.{index}", param) for index, part in enumerate(content)]


def _text_of(part: Any, kinds: Mapping[str, str], place: str, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        known = " and ".join(repr(name) for name in kinds)
        message = f"{place}: parts of type {str(kind)[:40]!r} are not supported, only {known}"
        raise bad_request(message, param, "unsupported_content")
    return text_field(part, kinds[kind], place, param)


def text_field(item: dict[str, Any], name: str, place: str, param: str) -> str:
    """Return a field that must be a string. Raises `ApiError` 400."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{place}.{name} must be a string", param)
    return value


def check_nesting(value: Any, param: str) -> None:
    """Raise `ApiError` 400 for a value too deep to be sent back."""
    if not isinstance(value, dict | list):
        return
    try:
        check_depth(value)
    except GrammarError as error:
        raise bad_request(f"{param}: {error.message}", param) from error
