"""Models of the answers of /v1/messages for the OpenAPI document."""

from typing import Any, Literal

from roseinfer.server.formats.request_document import AnswerModel, MeasuredSlo

EXAMPLE = (
    'event: message_start\ndata: {"type":"message_start","message":{...}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
DESCRIPTION = (
    "The message; with stream: true, Anthropic's events, the last of them message_stop, and ping as keep-alive. "
    "A failure during the stream is an event error, after which the connection is closed"
)


class TextBlock(AnswerModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(AnswerModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(AnswerModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokens(AnswerModel):
    thinking_tokens: int


class MessageSlo(MeasuredSlo):
    """Latencies measured by the server, in ms."""


class MessageUsage(AnswerModel):
    """Token counts. `input_tokens` excludes cached ones."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokens | None = None
    slo: MessageSlo | None = None


class ContextManagement(AnswerModel):
    """Always empty: the server never edits messages."""

    applied_edits: list[Any]


class Message(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "tool_use", "max_tokens", "stop_sequence", "timeout"]
    stop_sequence: str | None
    usage: MessageUsage
    context_management: ContextManagement | None = None
    warnings: list[str] | None = None


class MessageErrorDetails(AnswerModel):
    """Details of an error. `error_code`: stable name. `reason` and the following belong to `slo_unattainable`."""

    retryable: bool
    retry_after_s: int | None = None
    error_code: str | None = None
    param: str | None = None
    reason: Literal["ttft", "tpot", "e2e"] | None = None
    cause: str | None = None
    predicted_ttft_ms: float | None = None
    attainable_ms: float | None = None


class MessageErrorFields(AnswerModel):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: MessageErrorDetails | None = None


class MessageErrorBody(AnswerModel):
    type: Literal["error"]
    error: MessageErrorFields


class TokenCount(AnswerModel):
    input_tokens: int
