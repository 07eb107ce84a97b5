"""The bodies of /v1/messages and /v1/messages/count_tokens, and the chat that they ask for."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from roseinfer.core.errors import RequestTooLongError
from roseinfer.server.formats.as_chat import FieldNames, chat_request
from roseinfer.server.formats.chat_builder import ChatBuilder
from roseinfer.server.formats.messages.content import Content, system_texts
from roseinfer.server.formats.messages.tools import MessageTools
from roseinfer.server.formats.schemas import MAX_OBJECTS, Count, Objects, OneAnswerRequest, StopStrings
from roseinfer.server.formats.unsupported import Unsupported, always, if_set, never, unless, unsupported_error
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import RequestModel, unknown_fields
from roseinfer.server.request.models import ModelField


class AnthropicMessage(RequestModel):
    role: str
    content: str | Objects = Field([], description="text, or blocks: text, tool_use, tool_result, thinking")
    clear_at: Literal["next_user_message", "never"] | None = Field(
        None, description="of the system: next_user_message leaves its texts out after a later message of the user"
    )
    output_config: dict[str, Any] | None = Field(None, description="of the system: accepted, not used")


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
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_OBJECTS)]
    system: str | Objects | None = Field(None, description="text, or blocks of text")
    tools: Objects | None = Field(None, description="{name, description, input_schema, strict}")
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="like output_config.format")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")


class MessagesRequest(CountTokensRequest, OneAnswerRequest):
    max_tokens: Count = Field(description="maximum tokens of the answer")
    stop_sequences: StopStrings | None = Field(None, description="strings that end the text")
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
_UNSUPPORTED = {
    "compaction": Unsupported("conversations are not compacted here, ask for a summary instead", always),
    "container": Unsupported(_NO_MEMORY, always),
    # With this code Anthropic's packages retry without a thread.
    "thread": Unsupported(_NO_MEMORY, always, "thread_unsupported_request"),
    "stop": Unsupported("strings that end the text are stop_sequences", if_set),
}


def _removes(context_management: Any) -> bool:
    """True if it asks to remove anything from the messages."""
    edits = context_management.get("edits") if isinstance(context_management, dict) else context_management
    nothing = {"type": "clear_thinking_20251015", "keep": "all"}
    return bool(edits) and (not isinstance(edits, list) or any(edit != nothing for edit in edits))


# Edits only shorten a prompt, and the answer reports that none was applied. The server runs no tools.
_HINTS = {
    "cache_control": never,
    "user": never,
    "context_management": _removes,
    "mcp_servers": if_set,
    "speed": unless("standard"),
    "inference_geo": unless("global"),
}


def _too_long(error: RequestTooLongError) -> str:
    """Return the message that Anthropic's clients parse to shorten a conversation."""
    context = error.max_model_len or 0
    return f"prompt is too long: {error.prompt_tokens or context} tokens > {context - 1} maximum"


FIELD_NAMES = FieldNames(_NAMES, _UNSUPPORTED, _HINTS, _too_long)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def field_names(request: CountTokensRequest) -> FieldNames:
    """Return the names of the fields that this request uses, where two mean one field of the chat."""
    names = dict(_NAMES)
    if request.output_config is None or request.output_config.effort is None:
        names["reasoning_effort"] = "thinking"
    if request.output_format is not None:
        names |= dict.fromkeys(("response_format", "response_format.json_schema"), "output_format")
    # Of a prompt that is only counted.
    hints = _HINTS if isinstance(request, MessagesRequest) else _HINTS | {"max_tokens": never}
    return replace(FIELD_NAMES, names=names, hints=hints)


class MessagesTranslation:
    """Chat that asks for the same. Raises `ApiError` 400 when made. `warnings`: parts that are not used."""

    def __init__(self, request: CountTokensRequest) -> None:
        offered = MessageTools()
        offered.add(request.tools or [])
        said, unsaid = messages(request, offered)
        self.chat = chat_request(request, _fields(request, said, offered.functions()), field_names(request))
        self.warnings = [name[:100] for name in (*_ignored_parts(request), *offered.warnings, *unsaid)]


def _fields(request: CountTokensRequest, said: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of the chat that have other names there."""
    translated: dict[str, Any] = {
        "messages": said,
        "tools": tools or None,
        "chat_template_kwargs": request.chat_template_kwargs,
        "response_format": _response_format(request),
    }
    if said and request.messages[-1].role == said[-1]["role"] == "assistant":
        translated["continue_final_message"] = True
    if request.tool_choice is not None:
        translated["tool_choice"] = _tool_choice(request.tool_choice)
        translated["parallel_tool_calls"] = False if request.tool_choice.disable_parallel_tool_use else None
    if request.output_config is not None:
        translated["reasoning_effort"] = request.output_config.effort
    if request.thinking is not None:
        translated |= _thinking(request.thinking)
    if isinstance(request, MessagesRequest):
        if translated.get("thinking_token_budget", 0) >= request.max_tokens:
            raise bad_request("max_tokens must be greater than thinking.budget_tokens", "thinking.budget_tokens")
        translated["max_completion_tokens"] = request.max_tokens
        translated["stop"] = request.stop_sequences
    return translated


def _ignored_parts(request: CountTokensRequest) -> list[str]:
    """Return warnings for parts of fields that are not used."""
    parts = {"output_config": request.output_config, "thinking": request.thinking, "tool_choice": request.tool_choice}
    names = [f"{field}.{name}" for field, part in parts.items() if part for name in unknown_fields(part)]
    return names + ["messages.output_config"] * any(message.output_config for message in request.messages)


# --- messages -----------------------------------------------------------------------------------------------------
def messages(request: CountTokensRequest, offered: MessageTools) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of the chat, and warnings for parts that are left out. Raises `ApiError` 400.

    Changes of tools in messages are applied to `offered`.
    """
    chat = ChatBuilder()
    content = Content(chat, offered)
    if request.system is not None and (texts := system_texts(request.system)):
        chat.add_text("system", texts)
    last_of_user = max((index for index, message in enumerate(request.messages) if message.role == "user"), default=0)
    for index, message in enumerate(request.messages):
        place, cleared = f"messages.{index}", message.clear_at == "next_user_message" and index < last_of_user
        for number, block in enumerate(_blocks(message, place)):
            if not cleared or block.get("type") != "text":
                content.add(message.role, block, f"{place}.content.{number}")
    said = chat.messages()
    if not said:
        raise bad_request("messages contain no text, tool calls or results", "messages")
    return said, list(content.warnings)


def _blocks(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """Return the blocks of a message, a text as one. Raises `ApiError` 400 for fields that its role does not have."""
    if message.role not in ("user", "assistant", "system"):
        raise bad_request(f"{place}.role is not known: {message.role[:40]!r}", "messages")
    if message.role != "system":
        if "content" not in message.model_fields_set:
            raise bad_request(f"{place}.content: Field required", "messages")
        if message.clear_at is not None:
            raise bad_request(f"{place}.clear_at is only a field of the role system", "messages")
    return [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content


# --- thinking, formats and the choice of a tool -------------------------------------------------------------------
def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice.name must be a string", "tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _TOOL_CHOICES:
        raise bad_request("tool_choice.type must be auto, any, tool or none", "tool_choice")
    return _TOOL_CHOICES[choice.type]


def _thinking(config: ThinkingConfig) -> dict[str, Any]:
    if config.type == "enabled":
        if config.budget_tokens is None:
            raise bad_request("thinking.budget_tokens must be given", "thinking.budget_tokens")
        if config.budget_tokens < 0:  # to a chat, -1 is unlimited
            raise bad_request("thinking.budget_tokens must not be negative", "thinking.budget_tokens")
        return {"thinking_token_budget": config.budget_tokens}
    if config.budget_tokens is not None:
        raise bad_request("thinking.budget_tokens needs thinking of type enabled", "thinking.budget_tokens")
    if config.type not in ("disabled", "adaptive"):
        raise unsupported_error("thinking", "its type must be enabled, disabled or adaptive")
    return {"reasoning_effort": "none"} if config.type == "disabled" else {}


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    """Return the format of the chat. Anthropic's API has no name for a schema, and enforces it."""
    wanted = None if request.output_config is None else request.output_config.format
    if request.output_format is not None:
        if wanted not in (None, request.output_format):
            raise bad_request("output_format is not what output_config.format is", "output_format")
        wanted = request.output_format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        name = "output_config.format" if request.output_format is None else "output_format"
        raise unsupported_error(name, "its type must be json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema"), "strict": True}}
