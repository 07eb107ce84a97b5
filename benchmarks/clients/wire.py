"""Contents of requests and answers in each of the three APIs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one prompt, and how many of them were found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int


class Api(Protocol):
    """Notation of tools, turns and usage in one API."""

    def tools(self, body: Json) -> Iterator[tuple[str, Json]]:
        """Yield the name of each tool and the object that holds its schema."""
        ...

    def force(self, body: Json, name: str) -> None:
        """Make the answer a call of this tool."""
        ...

    def constrained(self, body: Json) -> bool:
        """True if the request itself demands a call or a format."""
        ...

    def turn(self, body: Json) -> str | None:
        """Return the texts that the user has added since the last answer, None after a tool's result."""
        ...

    def usage(self, event: Json) -> Usage | None:
        """Return the usage in an answer or an event of a stream."""
        ...


class Chat:
    schema = "parameters"

    def tools(self, body: Json) -> Iterator[tuple[str, Json]]:
        for tool in body.get("tools") or []:
            if tool.get("type") == "function":
                yield tool["function"]["name"], tool["function"]

    def force(self, body: Json, name: str) -> None:
        body["tool_choice"] = {"type": "function", "function": {"name": name}}

    def constrained(self, body: Json) -> bool:
        form = (body.get("response_format") or {}).get("type", "text")
        return form != "text" or body.get("tool_choice") not in (None, "auto", "none")

    def turn(self, body: Json) -> str | None:
        return _turn(body.get("messages") or [])

    def usage(self, event: Json) -> Usage | None:
        usage = event.get("usage")
        if not usage:
            return None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Usage(usage["prompt_tokens"], cached)


class Responses:
    schema = "parameters"

    def tools(self, body: Json) -> Iterator[tuple[str, Json]]:
        for tool in body.get("tools") or []:
            for one in tool["tools"] if tool.get("type") == "namespace" else [tool]:
                if one.get("type") == "function":
                    yield one["name"], one

    def force(self, body: Json, name: str) -> None:
        body["tool_choice"] = {"type": "function", "name": name}

    def constrained(self, body: Json) -> bool:
        form = ((body.get("text") or {}).get("format") or {}).get("type", "text")
        return form != "text" or body.get("tool_choice") not in (None, "auto", "none")

    def turn(self, body: Json) -> str | None:
        given = body.get("input") or []
        return given if isinstance(given, str) else _turn(given)

    def usage(self, event: Json) -> Usage | None:
        usage = (event.get("response") or event).get("usage")
        if not usage:
            return None
        cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
        return Usage(usage["input_tokens"], cached)


class Messages:
    schema = "input_schema"

    def tools(self, body: Json) -> Iterator[tuple[str, Json]]:
        for tool in body.get("tools") or []:
            if tool.get("type") in (None, "custom"):
                yield tool["name"], tool

    def force(self, body: Json, name: str) -> None:
        body["tool_choice"] = {"type": "tool", "name": name}

    def constrained(self, body: Json) -> bool:
        form = (body.get("output_config") or {}).get("format") or body.get("output_format")
        return bool(form) or (body.get("tool_choice") or {}).get("type") in ("any", "tool")

    def turn(self, body: Json) -> str | None:
        return _turn(body.get("messages") or [])

    def usage(self, event: Json) -> Usage | None:
        usage = (event.get("message") or event).get("usage")
        if not usage or "input_tokens" not in usage:
            return None
        cached = usage.get("cache_read_input_tokens") or 0
        return Usage(usage["input_tokens"] + cached, cached)


APIS: dict[str, Any] = {"/chat/completions": Chat(), "/responses": Responses(), "/messages": Messages()}


def api_of(path: str) -> Any:
    """Return the API of this path, None for other paths."""
    route = path.partition("?")[0]
    return next((api for end, api in APIS.items() if route.endswith(end)), None)


def events(answer: str) -> Iterator[Json]:
    """Yield the objects of a stream's `data:` lines, or the one object of a whole answer."""
    lines = [line[5:].strip() for line in answer.splitlines() if line.startswith("data:")]
    for text in lines or [answer]:
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


# Refusals after which a client continues in another way, by the rules of its API.
NEGOTIATED_CODES = {"thread_unsupported_request"}


def failure(event: Json) -> str | None:
    """Return the error in an answer or an event; None also for one that is part of the protocol."""
    error = event.get("error") or (event.get("response") or {}).get("error")
    details = (error.get("details") if isinstance(error, dict) else None) or {}
    if not error or details.get("error_code") in NEGOTIATED_CODES:
        return None
    return str(error.get("message", error) if isinstance(error, dict) else error)


def shared_start(first: Json, second: Json) -> Json:
    """Return the second body up to the first difference of the conversations, without streaming."""
    key = "messages" if "messages" in second else "input"
    before, after = first[key], second[key]
    count = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    shared = list(after[:count])
    if count < min(len(before), len(after)):
        pairs = [one.get("content") for one in (before[count], after[count])]
        if all(isinstance(content, list) for content in pairs):
            parts = [b for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(*pairs, strict=False))]
            shared += [{**after[count], "content": parts}] if parts else []
    return {**second, key: shared, "stream": False, "stream_options": None}


def _turn(items: list[Json]) -> str | None:
    texts: list[str] = []
    for item in reversed(items):
        kind, role, content = item.get("type", ""), item.get("role"), item.get("content")
        if role == "tool" or kind.endswith("_call_output"):
            return None
        if role == "assistant" or kind.endswith("_call"):
            break
        parts = [content] if isinstance(content, str) else content or []
        for part in parts:
            if isinstance(part, dict) and part.get("type") == "tool_result":
                return None
            if role == "user":
                texts.append(part if isinstance(part, str) else str(part.get("text", "")))
    return "\n".join(texts)
