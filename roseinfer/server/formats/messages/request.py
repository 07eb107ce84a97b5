"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chat that they ask for."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from roseinfer.server.formats.as_chat import (
    Turns,
    Vocabulary,
    chat_request,
    ignored_in_tools,
    refuse,
    text_field,
    texts_of,
    unsupported,
)
from roseinfer.server.formats.planning import Refusal, always, if_set, never, unless
from roseinfer.server.formats.schemas import (
    MAX_ITEMS,
    ChatRequest,
    ModelField,
    OneAnswerRequest,
    Parts,
    RequestModel,
    Strings,
    unknown_fields,
)
from roseinfer.server.http.errors import bad_request


class AnthropicMessage(RequestModel):
    role: str
    content: str | Parts = Field(description="text, or blocks: text, tool_use, tool_result, thinking")


class OutputConfig(RequestModel):
    format: dict[str, Any] | None = Field(None, description="{type: json_schema, schema}")
    effort: str | None = Field(None, description="for chat templates that read reasoning_effort")


class ThinkingConfig(RequestModel):
    type: str = Field(description="enabled, disabled or adaptive")
    budget_tokens: int | None = Field(None, description="tokens of thinking, after which the model has to answer")


class ToolChoice(RequestModel):
    type: str = Field(description="auto, any, tool or none")
    name: str | None = Field(None, description="of the tool")
    disable_parallel_tool_use: bool | None = Field(None, description="one call at most; default false")


class CountTokensRequest(ModelField):
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, max_length=MAX_ITEMS)]
    system: str | Parts | None = Field(None, description="text, or blocks of text")
    tools: Parts | None = Field(None, description="{name, description, input_schema, strict}")
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")


class MessagesRequest(CountTokensRequest, OneAnswerRequest):
    max_tokens: int = Field(description="tokens of the answer, at most")
    stop_sequences: Strings | None = Field(None, description="strings that end the text")
    metadata: dict[str, Any] | None = Field(None, description="accepted, not used")


_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_NO_MEMORY = "nothing is kept between requests"
_REFUSALS = {
    "container": Refusal(_NO_MEMORY, always),
    "mcp_servers": Refusal("only the client calls tools", if_set),
    "context_management": Refusal("messages are not edited", if_set),
    "speed": Refusal("there is one speed", unless("standard")),
    "stop": Refusal("strings that end the text are stop_sequences", if_set),
}
_HINTS = {"cache_control": never}
WORDS = Vocabulary(_NAMES, _REFUSALS, _HINTS)
_TEXT = {"text": "text"}
_ONLY_OURS = Refusal("only the model itself calls tools", unless(["direct"]))
_IN_TOOLS = {
    "defer_loading": Refusal("all tools are shown to the model", unless(False)),
    "allowed_callers": _ONLY_OURS,
}
# What tools may have beside what is refused there.
_TOOL_FIELDS = {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def words_of(request: CountTokensRequest) -> Vocabulary:
    """How much to think is said in two places, of which the chat has one."""
    if request.output_config is not None and request.output_config.effort is not None:
        return WORDS
    return replace(WORDS, names=_NAMES | {"reasoning_effort": "thinking"})


def as_chat(request: CountTokensRequest) -> ChatRequest:
    """The chat that asks for the same. Raises `ApiError` 400."""
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(request.tools or [])]
    translated: dict[str, Any] = {
        "messages": messages(request),
        "tools": tools or None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if request.messages and request.messages[-1].role == "assistant":
        translated["continue_final_message"] = True
    if request.tool_choice is not None:
        translated["tool_choice"] = _tool_choice(request.tool_choice)
        translated["parallel_tool_calls"] = False if request.tool_choice.disable_parallel_tool_use else None
    if request.output_config is not None:
        translated["response_format"] = _response_format(request.output_config.format)
        translated["reasoning_effort"] = request.output_config.effort
    if request.thinking is not None:
        translated |= _thinking(request.thinking)
    if isinstance(request, MessagesRequest):
        if request.max_tokens < 1:
            raise bad_request("max_tokens must be at least 1", "max_tokens")
        if translated.get("thinking_token_budget", 0) >= request.max_tokens:
            raise bad_request("max_tokens must be greater than thinking.budget_tokens", "thinking.budget_tokens")
        translated["max_completion_tokens"] = request.max_tokens
        translated["stop"] = request.stop_sequences
    return chat_request(request, translated, WORDS)


def ignored_parts(request: CountTokensRequest) -> list[str]:
    """What is ignored within fields: to be named among the warnings."""
    parts = {"output_config": request.output_config, "thinking": request.thinking, "tool_choice": request.tool_choice}
    names = [f"{field}.{name}" for field, part in parts.items() if part for name in unknown_fields(part)]
    names += ignored_in_tools(request.tools, _IN_TOOLS.keys() | _TOOL_FIELDS)
    blocks = [block for message in request.messages if isinstance(message.content, list) for block in message.content]
    if any(block.get("is_error") for block in blocks):
        names.append("messages.content.is_error")
    return [name[:100] for name in names]


# --- messages -----------------------------------------------------------------------------------------------------
def messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    """The messages of the chat. Raises `ApiError` 400."""
    turns = Turns()
    if request.system is not None:
        turns.say("system", texts_of(request.system, _TEXT, "system", "system"))
    for index, message in enumerate(request.messages):
        place = f"messages.{index}"
        if message.role not in ("user", "assistant", "system"):
            raise bad_request(f"{place}.role is not known: {message.role[:40]!r}", "messages")
        if isinstance(message.content, str):
            _add_text(turns, message.role, message.content)
            continue
        for number, block in enumerate(message.content):
            _add_block(turns, message.role, block, f"{place}.content.{number}")
    if not request.messages:
        raise bad_request("messages must not be empty", "messages")
    return turns.messages()


def _add_text(turns: Turns, role: str, text: str) -> None:
    if role == "assistant":
        turns.answer([text])
    else:
        turns.say(role, [text])


def _add_block(turns: Turns, role: str, block: dict[str, Any], place: str) -> None:
    kind = block.get("type")
    if kind == "text":
        _add_text(turns, role, text_field(block, "text", place, "messages"))
    elif kind == "tool_result" and role == "user":
        content = block.get("content")
        texts = [] if content is None else texts_of(content, _TEXT, f"{place}.content", "messages")
        turns.result(text_field(block, "tool_use_id", place, "messages"), texts)
    elif kind == "tool_use" and role == "assistant":
        _add_call(turns, block, place)
    elif kind == "thinking" and role == "assistant":
        turns.think(text_field(block, "thinking", place, "messages"))
    else:
        message = f"{place}: blocks of type {str(kind)[:40]!r} are not supported in messages of the role {role!r}"
        raise bad_request(message, "messages", "unsupported_content")


def _add_call(turns: Turns, block: dict[str, Any], place: str) -> None:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad_request(f"{place}.input must be an object", "messages")
    call_id, name = (text_field(block, field, place, "messages") for field in ("id", "name"))
    turns.call(call_id, name, arguments)


# --- tools, thinking and formats ----------------------------------------------------------------------------------
def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        message = f"{place}: tools of type {str(tool['type'])[:40]!r} are not supported, only those of the client"
        raise bad_request(message, "tools", "unsupported_field")
    for name, refusal in _IN_TOOLS.items():
        refuse(f"{place}.{name}", tool.get(name), {f"{place}.{name}": refusal})
    named = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    function = {name: tool[own] for name, own in named.items() if tool.get(own) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name must be a string", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _TOOL_CHOICES:
        raise bad_request("tool_choice.type must be auto, any, tool or none", "tool_choice")
    return _TOOL_CHOICES[choice.type]


def _thinking(config: ThinkingConfig) -> dict[str, Any]:
    if (config.model_extra or {}).get("display") == "omitted":
        raise unsupported("thinking.display", "what the model thinks is shown")
    if config.type == "enabled":
        if config.budget_tokens is None:
            raise bad_request("thinking.budget_tokens must be given", "thinking.budget_tokens")
        return {"thinking_token_budget": config.budget_tokens}
    if config.budget_tokens is not None:
        raise bad_request("thinking.budget_tokens needs thinking of type enabled", "thinking.budget_tokens")
    if config.type not in ("disabled", "adaptive"):
        raise unsupported("thinking", "its type must be enabled, disabled or adaptive")
    return {"reasoning_effort": "none"} if config.type == "disabled" else {}


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """Anthropic's API has no name for a schema, and enforces it."""
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise unsupported("output_config.format", "its type must be json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema"), "strict": True}}
