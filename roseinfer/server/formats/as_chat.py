"""Other APIs' requests as chats: what the translations of Responses and Messages have in common."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.errors import InvalidRequestError, RequestTooLongError
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import check_depth
from roseinfer.server.formats.chat import chat_job
from roseinfer.server.formats.planning import Asks, Refusal
from roseinfer.server.formats.schemas import ChatRequest, ModelField, OneAnswerRequest, parse, unknown_fields
from roseinfer.server.http.errors import ApiError, as_api_error, bad_request
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job

# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How an API's fields differ from a chat's. `names`: a chat's field -> where a client of the API wrote what is in
    it, `*` standing for a position; `refusals`: fields that cannot be honoured; `hints`: fields that may be left
    undone, and which of their values ask for something.
    """

    names: Mapping[str, str]
    refusals: Mapping[str, Refusal]
    hints: Mapping[str, Asks]
    # Message of the API for a prompt that is too long; None: that of chats.
    too_long: Callable[[RequestTooLongError], str] | None = None

    def asks(self, name: str, value: Any) -> bool:
        """True unless the value of a field that may be left undone asks for nothing."""
        hint = self.hints.get(name)
        return hint is None or hint(value)

    def in_own_words(self, text: str, field: str = "") -> str:
        """`text` with the API's names of a chat's `field` and those below it; "": of all fields."""
        for name in sorted(self.names, key=len, reverse=True):
            if f"{name}.".startswith(f"{field}." if field else ""):
                pattern = re.escape(name).replace(r"\*", r"(\d+)")
                text = re.sub(rf"(?<![\w.]){pattern}(?!\w)", self.names[name].replace("*", r"\1"), text)
        return text

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Those of a chat that are raised here name the fields that the client wrote."""
        try:
            yield
        except (ApiError, InvalidRequestError) as raised:
            error = as_api_error(raised)
            if self.too_long is not None and isinstance(raised, RequestTooLongError):
                error.message = self.too_long(raised)
            elif error.param is not None:
                error.message = self.in_own_words(error.message, error.param)
            if error.param is not None:
                error.param = self.in_own_words(error.param)
            raise error from raised


def chat_request(request: ModelField, translated: dict[str, Any], words: Vocabulary) -> ChatRequest:
    """A chat with the fields of `request` that all APIs have, the `translated` ones, and what no schema names.

    Raises `ApiError` 400 for what cannot be honoured, and for fields of a chat that the API does not have: what they
    mean there, they do not mean here.
    """
    common = {name: getattr(request, name, None) for name in OneAnswerRequest.model_fields}
    extras = unknown_fields(request)
    for name, value in extras.items():
        refuse(name, value, words.refusals)
    extras = {name: value for name, value in extras.items() if name not in words.refusals and words.asks(name, value)}
    for name in extras.keys() & (ChatRequest.model_fields.keys() - OneAnswerRequest.model_fields.keys()):
        raise unsupported(name, "it is a field of /v1/chat/completions")
    given = {name: value for name, value in (common | translated).items() if value is not None}
    with words.errors():
        return parse(ChatRequest, extras | given)


async def translated_job(
    call: Call, chat: ChatRequest, words: Vocabulary, api: str, id_prefix: str, ignored: list[str]
) -> Job:
    """The job of a chat that is a translation. `api`: what logs call it; `ignored`: fields to be named beside those
    that the chat ignores. Raises `ApiError` 400 or 404.
    """
    with words.errors():
        job = await chat_job(call, chat)
    warnings = [words.in_own_words(name) for name in job.warnings] + ignored
    kept = tuple(warnings[: call.limits.max_warnings])
    return replace(job, api=api, id=f"{id_prefix}_{job.request_id}", warnings=kept)


def refuse(name: str, value: Any, refusals: Mapping[str, Refusal]) -> None:
    """Raises `ApiError` 400 if the field asks for what cannot be done."""
    refusal = refusals.get(name)
    if value is not None and refusal is not None and refusal.asks(value):
        raise unsupported(name, refusal.why, refusal.code)


def ignored_in_tools(tools: list[dict[str, Any]] | None, known: Set[str]) -> list[str]:
    """Names of fields of tools that are not `known`, each once: to be named among the warnings."""
    found = {name: None for tool in tools or [] for name, value in tool.items() if value is not None}
    return [f"tools.{name}" for name in found if name not in known]


def check_nesting(value: Any, param: str) -> None:
    """Of what is sent back, which cannot be written if it is too deep. Raises `ApiError` 400."""
    if not isinstance(value, dict | list):
        return
    try:
        check_depth(value)
    except GrammarError as error:
        raise bad_request(f"{param}: {error.message}", param) from error


def unsupported(name: str, why: str, code: str = "unsupported_field") -> ApiError:
    return bad_request(f"{name[:100]} is not supported: {why}", name[:100], code)


# --- messages ---------------------------------------------------------------------------------------------------------
class Turns:
    """The messages of a chat, from pieces in the order they were said. An assistant's pieces are one message as far as
    they fit into one: first what it thought, then its text, then its tool calls.
    """

    def __init__(self) -> None:
        # Their contents and reasoning are lists of texts until all is said.
        self._said: list[dict[str, Any]] = []

    def messages(self) -> list[dict[str, Any]]:
        """All of them; nothing can be added then."""
        for message in self._said:
            message["content"] = _parts(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
            if message["role"] == "assistant" and "tool_calls" not in message and message["content"] is None:
                message["content"] = ""  # such as one that was cut while it thought
        return self._said

    def say(self, role: str, texts: list[str]) -> None:
        """As the system, the developer or the user; what the same one says in turn is one message."""
        last = self._said[-1] if self._said else None
        if last is not None and last["role"] == role:
            last["content"] += texts
        else:
            self._said.append({"role": role, "content": list(texts)})

    def think(self, text: str) -> None:
        message = self._assistant(lambda said: not said["content"] and "tool_calls" not in said)
        message.setdefault("reasoning_content", []).append(text)

    def answer(self, texts: list[str]) -> None:
        self._assistant(lambda said: "tool_calls" not in said)["content"] += texts

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant(lambda said: True).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, texts: list[str]) -> None:
        self._said.append({"role": "tool", "tool_call_id": call_id, "content": texts or [""]})

    def _assistant(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        last = self._said[-1] if self._said else None
        if last is None or last["role"] != "assistant" or not fits(last):
            last = {"role": "assistant", "content": []}
            self._said.append(last)
        return last


def _parts(texts: list[str]) -> str | list[dict[str, str]] | None:
    """Several texts stay several: the template decides how they are joined."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else None


def texts_of(content: Any, kinds: Mapping[str, str], place: str, param: str) -> list[str]:
    """The texts of a content, which is one, or a list of parts. `kinds`: type of a part -> its field with the text.

    Raises `ApiError` 400 for anything else.
    """
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
    """A field that must be a string. Raises `ApiError` 400."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{place}.{name} must be a string", param)
    return value
