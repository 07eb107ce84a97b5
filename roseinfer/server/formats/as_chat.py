"""Translation of other APIs' requests to chats: what Responses and Messages share."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.errors import InvalidRequestError, RequestTooLongError
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import check_depth
from roseinfer.server.formats.chat import chat_job
from roseinfer.server.formats.schemas import ChatRequest, ModelField, OneAnswerRequest
from roseinfer.server.formats.unsupported import HasEffect, Unsupported
from roseinfer.server.http.errors import ApiError, as_api_error, bad_request
from roseinfer.server.http.request_models import parse, unknown_fields
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.job import Job

# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Differences between the fields of an API and those of a chat.

    `names`: field of a chat -> field in the API, `*` standing for a position. `unsupported`: fields that are rejected.
    `hints`: fields that may be ignored, and which of their values have an effect.
    """

    names: Mapping[str, str]
    unsupported: Mapping[str, Unsupported]
    hints: Mapping[str, HasEffect]
    # Message of the API for a prompt that is too long; None: that of chats.
    too_long: Callable[[RequestTooLongError], str] | None = None

    def is_ignored(self, name: str, value: Any) -> bool:
        """True if ignoring the field deserves a warning."""
        has_effect = self.hints.get(name)
        return has_effect is None or has_effect(value)

    def translate(self, text: str, field: str = "") -> str:
        """Return `text` with the API's names for `field` of a chat and the fields below it; "" = all fields."""
        for name in sorted(self.names, key=len, reverse=True):
            if f"{name}.".startswith(f"{field}." if field else ""):
                pattern = re.escape(name).replace(r"\*", r"(\d+)")
                text = re.sub(rf"(?<![\w.]){pattern}(?!\w)", self.names[name].replace("*", r"\1"), text)
        return text

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Let errors of a chat name the fields of the API."""
        try:
            yield
        except (ApiError, InvalidRequestError) as raised:
            error = as_api_error(raised)
            if self.too_long is not None and isinstance(raised, RequestTooLongError):
                error.message = self.too_long(raised)
            elif error.param is not None:
                error.message = self.translate(error.message, error.param)
            if error.param is not None:
                error.param = self.translate(error.param)
            raise error from raised


def chat_request(request: ModelField, translated: dict[str, Any], names: FieldNames) -> ChatRequest:
    """Return a chat with the common fields of `request`, the `translated` ones and unknown ones.

    Raises `ApiError` 400 for unsupported fields, and for fields of a chat that the API does not have.
    """
    common = {name: getattr(request, name, None) for name in OneAnswerRequest.model_fields}
    extras = unknown_fields(request)
    for name, value in extras.items():
        check_supported(name, value, names.unsupported)
    extras = {
        name: value for name, value in extras.items() if name not in names.unsupported and names.is_ignored(name, value)
    }
    for name in extras.keys() & (ChatRequest.model_fields.keys() - OneAnswerRequest.model_fields.keys()):
        raise unsupported_error(name, "it is a field of /v1/chat/completions")
    given = {name: value for name, value in (common | translated).items() if value is not None}
    with names.errors():
        return parse(ChatRequest, extras | given)


async def translated_job(
    call: RequestContext, chat: ChatRequest, names: FieldNames, api: str, id_prefix: str, ignored: list[str]
) -> Job:
    """Return the job of a translated chat. `api`: kind of answer, for logs; `ignored`: further ignored fields.

    Raises `ApiError` 400 or 404.
    """
    with names.errors():
        job = await chat_job(call, chat)
    warnings = [names.translate(name) for name in job.warnings] + ignored
    kept = tuple(warnings[: call.limits.max_warnings])
    return replace(job, api=api, id=f"{id_prefix}_{job.request_id}", warnings=kept)


def check_supported(name: str, value: Any, unsupported: Mapping[str, Unsupported]) -> None:
    """Raise `ApiError` 400 if an unsupported field has an effect."""
    found = unsupported.get(name)
    if value is not None and found is not None and found.has_effect(value):
        raise unsupported_error(name, found.why, found.code)


def ignored_in_tools(tools: list[dict[str, Any]] | None, known: Set[str]) -> list[str]:
    """Return warnings for fields of tools that are not `known`, each once."""
    found = {name: None for tool in tools or [] for name, value in tool.items() if value is not None}
    return [f"tools.{name}" for name in found if name not in known]


def check_nesting(value: Any, param: str) -> None:
    """Raise `ApiError` 400 for a value too deep to be sent back."""
    if not isinstance(value, dict | list):
        return
    try:
        check_depth(value)
    except GrammarError as error:
        raise bad_request(f"{param}: {error.message}", param) from error


def unsupported_error(name: str, why: str, code: str = "unsupported_field") -> ApiError:
    return bad_request(f"{name[:100]} is not supported: {why}", name[:100], code)


# --- messages ---------------------------------------------------------------------------------------------------------
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
