"""The body of /v1/responses, and the chat that it asks for."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from roseinfer.server.formats.as_chat import (
    Turns,
    Vocabulary,
    chat_request,
    check_nesting,
    ignored_in_tools,
    refuse,
    text_field,
    texts_of,
    unsupported,
)
from roseinfer.server.formats.planning import Refusal, always, if_set, unless
from roseinfer.server.formats.schemas import ChatRequest, OneAnswerRequest, Parts, RequestModel, Strings, unknown_fields
from roseinfer.server.http.errors import bad_request


class TextOptions(RequestModel):
    format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with name and schema")
    verbosity: str | None = Field(None, description="only 'medium', which asks for nothing")


class ReasoningOptions(RequestModel):
    effort: str | None = Field(None, description="'none' turns thinking off where the chat template can")


MAX_METADATA = 16


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"Dictionary should have at most {MAX_METADATA} items, not {len(value)}")
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(_few)]


class ResponsesRequest(OneAnswerRequest):
    input: str | Parts = Field(description="text, or items: messages, function calls, their outputs, reasoning")
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(None, description="default: the rest of the context")
    tools: Parts | None = Field(None, description="functions: {type, name, description, parameters, strict}")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, a function, some tools")
    parallel_tool_calls: bool | None = Field(None, description="default true")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stop: str | Strings | None = Field(None, description="strings that end the text")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")
    metadata: Metadata | None = Field(None, description="returned as it is; up to 16 texts by name")
    user: str | None = Field(None, description="accepted, not used")


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools.*.function": "tools.*",
    "verbosity": "text.verbosity",
}
_STATELESS = "responses are not kept"
_REFUSALS = {
    "previous_response_id": Refusal(f"{_STATELESS}, send the items of earlier turns as input", always),
    "conversation": Refusal(f"{_STATELESS}, send the items of earlier turns as input", always),
    "background": Refusal(f"{_STATELESS}, so nobody could ask for this one later", unless(False)),
    "prompt": Refusal("there are no stored prompts", always),
    "context_management": Refusal("inputs are not compacted", if_set),
    "truncation": Refusal("inputs are not cut", unless("disabled")),
    "top_logprobs": Refusal("log probabilities are those of /v1/chat/completions", unless(0)),
}
# They ask for what is not here to be done (there are no built-in tools), or say what is true anyway.
_INERT = frozenset({"store", "max_tool_calls", "prompt_cache_key", "safety_identifier", "include"})
WORDS = Vocabulary(_NAMES, _REFUSALS, _INERT)
_LOGPROBS = "message.output_text.logprobs"
_USER_PARTS = {"input_text": "text"}
_ASSISTANT_PARTS = {"output_text": "text", "refusal": "refusal", "input_text": "text"}
_REASONING_PARTS = {"reasoning_text": "text"}
_SUMMARY_PARTS = {"summary_text": "text"}


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """The chat that asks for the same. Raises `ApiError` 400."""
    _check_include((request.model_extra or {}).get("include"))
    for name, value in (("tools", request.tools), ("tool_choice", request.tool_choice)):
        check_nesting(value, name)
    check_nesting(None if request.text is None else request.text.format, "text.format")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise bad_request("max_output_tokens must be at least 1", "max_output_tokens")
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or [])]
    translated: dict[str, Any] = {
        "messages": messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "tools": tools or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "stop": request.stop,
        "chat_template_kwargs": request.chat_template_kwargs,
        "user": request.user,
    }
    if request.text is not None:
        translated["response_format"] = _response_format(request.text.format)
        translated["verbosity"] = request.text.verbosity
    if request.reasoning is not None:
        translated["reasoning_effort"] = request.reasoning.effort
    return chat_request(request, translated, WORDS)


def ignored_parts(request: ResponsesRequest) -> list[str]:
    """What is ignored within fields: to be named among the warnings."""
    parts = {"text": request.text, "reasoning": request.reasoning}
    names = [f"{field}.{name}" for field, part in parts.items() if part for name in unknown_fields(part)]
    names += ignored_in_tools(request.tools, _IN_TOOLS.keys() | _TOOL_FIELDS)
    include = (request.model_extra or {}).get("include")
    return [name[:100] for name in names + [f"include.{name}" for name in include or []]]


def _check_include(include: Any) -> None:
    if include is not None and (not isinstance(include, list) or not all(isinstance(name, str) for name in include)):
        raise bad_request("include must be a list of strings", "include")
    if _LOGPROBS in (include or []):
        raise unsupported("include", f"{_LOGPROBS!r} is not available, log probabilities are a chat's")


# --- the input ----------------------------------------------------------------------------------------------------
def messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages of the chat. Raises `ApiError` 400."""
    turns = Turns()
    if request.instructions is not None:
        turns.say("system", [request.instructions])
    if isinstance(request.input, str):
        turns.say("user", [request.input])
    else:
        for index, item in enumerate(request.input):
            _add_item(turns, item, f"input.{index}")
        if not request.input:
            raise bad_request("input must not be empty", "input")
    return turns.messages()


def _add_item(turns: Turns, item: dict[str, Any], place: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        _add_message(turns, item, place)
    elif kind == "function_call":
        arguments = text_field(item, "arguments", place, "input")
        turns.call(text_field(item, "call_id", place, "input"), text_field(item, "name", place, "input"), arguments)
    elif kind == "function_call_output":
        output = texts_of(item.get("output"), _USER_PARTS, f"{place}.output", "input")
        turns.result(text_field(item, "call_id", place, "input"), output)
    elif kind == "reasoning":
        _add_reasoning(turns, item, place)
    else:
        shown = str(kind)[:40]
        message = f"{place}: items of type {shown!r} are not supported"
        raise bad_request(message, "input", "unsupported_field")


def _add_message(turns: Turns, item: dict[str, Any], place: str) -> None:
    role = text_field(item, "role", place, "input")
    parts = _ASSISTANT_PARTS if role == "assistant" else _USER_PARTS
    texts = texts_of(item.get("content"), parts, f"{place}.content", "input")
    if role == "assistant":
        turns.answer(texts)
    elif role in ("user", "system", "developer"):
        turns.say(role, texts)
    else:
        raise bad_request(f"{place}.role is not known: {role[:40]!r}", "input")


def _add_reasoning(turns: Turns, item: dict[str, Any], place: str) -> None:
    """What was thought, or if that is not there, the summary of it."""
    if item.get("encrypted_content"):
        message = f"{place}.encrypted_content is not supported: reasoning is sent in the open here"
        raise bad_request(message, "input", "unsupported_field")
    texts = texts_of(item.get("content") or [], _REASONING_PARTS, f"{place}.content", "input")
    texts = texts or texts_of(item.get("summary") or [], _SUMMARY_PARTS, f"{place}.summary", "input")
    if texts:
        turns.think("\n".join(texts))


# --- tools and formats --------------------------------------------------------------------------------------------
def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """The function stands within the tool in chats, and is the tool here."""
    if tool.get("type") != "function":
        shown = str(tool.get("type"))[:40]
        message = f"{place}: tools of type {shown!r} are not supported, only 'function'"
        raise bad_request(message, "tools", "unsupported_field")
    for name in ("defer_loading", "allowed_callers"):
        refuse(f"{place}.{name}", tool.get(name), {f"{place}.{name}": _IN_TOOLS[name]})
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in known if tool.get(name) is not None}}


_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}
_IN_TOOLS = {
    "defer_loading": Refusal("all tools are shown to the model", unless(False)),
    "allowed_callers": Refusal("only the model itself calls tools", unless(["direct"])),
}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise bad_request("tool_choice.tools must be a list of objects", "tool_choice")
        named = [_named(tool) for tool in tools if tool.get("type") == "function"]
        if len(named) < len(tools):
            raise unsupported("tool_choice", "only tools of type 'function' can be allowed")
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    raise unsupported("tool_choice", f"there are no tools of type {str(kind)[:40]!r}")


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": text_field(choice, "name", "tool_choice", "tool_choice")}}


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """A schema stands beside its name here, and within an object of its own in chats."""
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    known = {name: value for name, value in wanted.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": known}
