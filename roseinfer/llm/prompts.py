"""Prompts in the forms that `LLM` takes."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from roseinfer.core.errors import InvalidRequestError
from roseinfer.text.call_arguments import plain_arguments


class TextPrompt(TypedDict):
    """Prompt as text. Only prompts with the same `cache_salt` share cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Prompt as token ids. `prompt`: its text, which is only returned."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
Conversation = Sequence[Message]

_EXPECTED = "text, a list of token ids, or a dictionary with 'prompt' or 'prompt_token_ids'"
_MEDIA = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "encoder_prompt")
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt: text, token ids, or both, which are then not tokenised again.

    `generation_prompt_len`: see `Prompt`.
    """

    text: str | None
    ids: list[int] | None
    cache_salt: str = ""
    generation_prompt_len: int = 0


def as_batch(prompts: Any) -> list[Any]:
    """Return a list of prompts from one or several. Raise `InvalidRequestError` for what is neither, or empty."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts must be {_EXPECTED}, or a list of these; got {kind_of(prompts)}", "prompts")
    batch = list(prompts)
    return [batch] if batch and all(isinstance(item, Integral) for item in batch) else batch


def read_prompt(prompt: Any) -> PromptInput:
    """Raise `InvalidRequestError` for a prompt of another type."""
    if isinstance(prompt, str):
        return PromptInput(prompt, None)
    if isinstance(prompt, Mapping):
        return _read_dictionary(prompt)
    return PromptInput(None, _as_ids(prompt, "prompt", f"a prompt must be {_EXPECTED}"))


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Return a list of conversations from one or several. Raise `InvalidRequestError` for what is neither, or empty."""
    expected = "messages must be a list of dictionaries with 'role' and 'content', or a list of such lists"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequestError(f"{expected}; got {kind_of(messages)}", "messages")
    given = list(messages)
    if not given or all(isinstance(item, Mapping) for item in given):
        return [_as_dictionaries(given)]
    if any(isinstance(item, str | bytes | Mapping) or not isinstance(item, Iterable) for item in given):
        wrong = next(item for item in given if not isinstance(item, Mapping))
        raise InvalidRequestError(f"{expected}; got a list with {kind_of(wrong)}", "messages")
    return [_as_dictionaries(conversation) for conversation in given]


def _as_dictionaries(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return messages as dictionaries. Others are left for the template, which names them."""
    made = [_plain_message(message) if isinstance(message, Mapping) else message for message in messages]
    if not made:
        raise InvalidRequestError("a conversation must have at least one message", "messages")
    return made


def _plain_message(message: Message) -> dict[str, Any]:
    """Return a message as templates take it: without fields that are None, an empty list of tool calls, or tool calls
    without a text. Many templates ask only whether `tool_calls` is there.
    """
    made = {name: value for name, value in message.items() if value is not None}
    if made.get("role") == "assistant":
        made.setdefault("content", "")
    calls = made.get("tool_calls")
    if isinstance(calls, list | tuple):
        del made["tool_calls"]
        made |= {"tool_calls": [_plain_call(call) for call in calls]} if calls else {}
    return made


def _plain_call(call: Any) -> Any:
    """Return a tool call with an object as its arguments. What is no call is left for the template."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": plain_arguments(function.get("arguments"))}}


def _read_dictionary(prompt: Mapping[str, Any]) -> PromptInput:
    media = next((name for name in _MEDIA if prompt.get(name)), None)
    if media is not None:
        raise InvalidRequestError(f"{media} is not supported: prompts are text or token ids", media)
    unknown = next((name for name in prompt if name not in _KEYS and name not in _MEDIA), None)
    if unknown is not None:
        raise InvalidRequestError(f"unknown key {unknown!r} in a prompt; known: {', '.join(_KEYS)}", "prompt")
    text, ids, salt = (prompt.get(name) for name in _KEYS)
    if text is None and ids is None:
        raise InvalidRequestError(f"a prompt must be {_EXPECTED}; got a dictionary without both keys", "prompt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be text, got {kind_of(value)}", name)
    if ids is not None:
        ids = _as_ids(ids, "prompt_token_ids", "prompt_token_ids must be a list of integers")
    return PromptInput(text, ids, salt or "")


def _as_ids(given: Any, name: str, expected: str) -> list[int]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{expected}; got {kind_of(given)}", name)
    ids = list(given)
    try:
        return list(map(operator.index, ids))
    except TypeError:
        wrong = next((kind_of(one) for one in ids if not hasattr(one, "__index__")), kind_of(ids[0]))
        raise InvalidRequestError(f"{expected}; got a list with {wrong}", name) from None


def as_keywords(given: Any, name: str) -> dict[str, Any]:
    """Return a dictionary, empty for None. Raise `InvalidRequestError` naming the argument for another type."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidRequestError(f"{name} must be a dictionary with texts as keys, got {kind_of(given)}", name)
    return dict(given)


def as_tools(given: Any) -> list[Any]:
    """Return a list of tools. Raise `InvalidRequestError` for another type."""
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    tools = list(given) if listed else []
    if not listed or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError(f"tools must be a list of dictionaries, got {kind_of(given)}", "tools")
    return tools


def kind_of(value: Any) -> str:
    """Return the name of a value's type, for messages."""
    return "None" if value is None else type(value).__name__
