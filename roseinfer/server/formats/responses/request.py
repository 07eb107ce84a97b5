"""The body of /v1/responses, and the chat that it asks for."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

from roseinfer.server.formats.as_chat import FieldNames, chat_request
from roseinfer.server.formats.build_job import ignored_stream_options
from roseinfer.server.formats.chat_builder import ChatBuilder, check_nesting
from roseinfer.server.formats.responses.items import CONFIGURATION, InputItems, tools_within
from roseinfer.server.formats.responses.tools import OfferedTools
from roseinfer.server.formats.schemas import Count, Objects, OneAnswerRequest, StopString, StopStrings
from roseinfer.server.formats.unsupported import Unsupported, always, if_set, never, unless, unsupported_error
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import RequestModel, unknown_fields

# An empty list is valid only after a stored response.
InputList = Annotated[Objects, Field(json_schema_extra={"minItems": 1})]


class TextOptions(RequestModel):
    format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with name and schema")
    verbosity: str | None = Field(None, description="accepted, not used")


class ReasoningOptions(RequestModel):
    effort: str | None = Field(None, description="'none' disables reasoning where the chat template can")


MAX_METADATA = 16


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"Dictionary should have at most {MAX_METADATA} items, not {len(value)}")
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(_few)]


class ResponsesRequest(OneAnswerRequest):
    input: str | InputList = Field(
        [],
        description="text, or items: messages, function calls, their outputs, reasoning; optional after a response",
    )
    previous_response_id: str | None = Field(None, description="a stored response that this one continues")
    store: bool | None = Field(None, description="keep the response to be asked for and continued; default true")
    background: bool | None = Field(None, description="answer at once, run without the client; needs store")
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: Count | None = Field(None, description="default: the rest of the context")
    tools: Objects | None = Field(
        None, description="functions, custom tools, namespaces, shells, apply_patch; others are left out"
    )
    tool_choice: str | dict[str, Any] | None = Field(None, description="none, auto, required, a function, some tools")
    parallel_tool_calls: bool | None = Field(None, description="default true")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stop: StopString | StopStrings | None = Field(None, description="strings that end the text")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")
    stream_options: dict[str, Any] | None = Field(None, description="accepted: the usage is sent anyway")
    metadata: Metadata | None = Field(None, description="returned as it is; up to 16 texts by name")
    user: str | None = Field(None, description="accepted, not used")
    # Items at the start of `input` that come from a stored response.
    _earlier_items: int = PrivateAttr(0)

    def continuing(self, earlier: list[dict[str, Any]], given: list[dict[str, Any]]) -> "ResponsesRequest":
        """Return a copy with stored items before those that were given."""
        whole = self.model_copy(update={"input": earlier + given})
        whole._earlier_items = len(earlier)
        return whole

    def place_of(self, index: int) -> str:
        """Name of an item of `input` in messages to the client."""
        given = index - self._earlier_items
        return f"input.{given}" if given >= 0 else f"previous_response_id, item {index}"


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tools.*.function": "tools.*",
    "verbosity": "text.verbosity",
}
_NO_OUTPUT = "responses without output are not made"
_UNSUPPORTED = {
    "conversation": Unsupported("there are no conversation objects, give previous_response_id", always),
    "prompt": Unsupported("there are no stored prompts", always),
    "generate": Unsupported(_NO_OUTPUT, unless(True)),
    "top_logprobs": Unsupported("log probabilities are those of /v1/chat/completions", unless(0)),
}
# An input that is too long is refused, whatever was to be done with it. No built-in tool is called.
_HINTS = {
    "max_tool_calls": never,
    "include": never,  # its entries are named one by one
    "context_management": if_set,
    "truncation": unless("disabled"),
}
FIELD_NAMES = FieldNames(_NAMES, _UNSUPPORTED, _HINTS)
_LOGPROBS = "message.output_text.logprobs"


class ResponsesTranslation:
    """Chat that asks for the same. Raises `ApiError` 400 when made.

    `call_names`: the name in a call -> the client's name of the tool. `warnings`: parts that are not used.
    `request`: with the settings of its input items.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self.request = request = configured(request)
        offered = OfferedTools()
        offered.add(request.tools or [], "tools")
        _check_values(request)
        tools_within(request.input, request.place_of, offered)
        self.call_names = offered.call_names()
        said, left_out = messages(request, offered)
        choice = offered.choice(request.tool_choice)
        self.chat = chat_request(request, _fields(request, said, offered.functions, choice), FIELD_NAMES)
        self.warnings = [name[:100] for name in (*_ignored_parts(request), *offered.warnings, *left_out)]


def configured(request: ResponsesRequest) -> ResponsesRequest:
    """Return the request with the settings of `configuration_update` items. The last one counts for each setting.

    Raises `ApiError` 400.
    """
    changes: dict[str, RequestModel] = {}
    for index, item in enumerate([] if isinstance(request.input, str) else request.input):
        if item.get("type") != CONFIGURATION:
            continue
        place = request.place_of(index)
        if (effort := _setting(item, "reasoning", "effort", str, place)) is not None:
            reasoning = request.reasoning or ReasoningOptions.model_validate({})
            changes["reasoning"] = reasoning.model_copy(update={"effort": effort})
        if (format := _setting(item, "text", "format", dict, place)) is not None:
            text = request.text or TextOptions.model_validate({})
            changes["text"] = text.model_copy(update={"format": format})
    return request.model_copy(update=changes) if changes else request


def _setting(item: dict[str, Any], part: str, name: str, kind: type, place: str) -> Any:
    """Return a setting of a `configuration_update` item, None if it is not given."""
    within = item.get(part)
    if not isinstance(within, dict | None):
        raise bad_request(f"{place}.{part} must be an object", "input")
    value = within.get(name) if within else None
    if not isinstance(value, kind | None):
        raise bad_request(f"{place}.{part}.{name} must be {'a string' if kind is str else 'an object'}", "input")
    return value


def _check_values(request: ResponsesRequest) -> None:
    extras = request.model_extra or {}
    _check_include(extras.get("include"))
    cache = extras.get("prompt_cache_options")
    if isinstance(cache, dict) and cache.get("prewarm"):
        raise unsupported_error("prompt_cache_options", f"prewarm: {_NO_OUTPUT}")
    for name, value in (("tools", request.tools), ("tool_choice", request.tool_choice)):
        check_nesting(value, name)
    check_nesting(None if request.text is None else request.text.format, "text.format")


def _fields(
    request: ResponsesRequest,
    said: list[dict[str, Any]],
    functions: list[dict[str, Any]],
    choice: str | dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the fields of the chat that have other names there."""
    translated: dict[str, Any] = {
        "messages": said,
        "max_completion_tokens": request.max_output_tokens,
        "tools": functions or None,
        "tool_choice": choice,
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
    return translated


def _ignored_parts(request: ResponsesRequest) -> list[str]:
    """Return warnings for parts of fields that are not used."""
    parts = {"text": request.text, "reasoning": request.reasoning}
    names = [f"{field}.{name}" for field, part in parts.items() if part for name in unknown_fields(part)]
    options = {name: value for name, value in (request.stream_options or {}).items() if name != "include_usage"}
    names += ignored_stream_options(options)
    include = (request.model_extra or {}).get("include")
    return names + [f"include.{name}" for name in include or []]


def _check_include(include: Any) -> None:
    if include is not None and (not isinstance(include, list) or not all(isinstance(name, str) for name in include)):
        raise bad_request("include must be a list of strings", "include")
    if _LOGPROBS in (include or []):
        raise unsupported_error("include", f"{_LOGPROBS!r} is not available, log probabilities are a chat's")


def messages(request: ResponsesRequest, offered: OfferedTools) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of the chat, and warnings for items that are left out. Raises `ApiError` 400."""
    chat = ChatBuilder()
    items = InputItems(chat, offered)
    if request.instructions is not None:
        chat.add_text("system", [request.instructions])
    if isinstance(request.input, str):
        chat.add_text("user", [request.input])
    else:
        for index, item in enumerate(request.input):
            items.add(item, request.place_of(index))
        if not request.input:
            raise bad_request("input must not be empty", "input")
    said = chat.messages()
    if not said:
        raise bad_request("input contains no text, tool calls or results", "input")
    return said, list(items.warnings)


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """A schema stands beside its name here, and within an object of its own in chats."""
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    known = {name: value for name, value in wanted.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": known}
