"""Models of the answers of /v1/responses for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from roseinfer.server.formats.request_document import RequestWhy

EXAMPLE = (
    'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{...}}\n\n'
    'event: response.completed\ndata: {"type":"response.completed","sequence_number":9,"response":{...}}\n\n'
)
DESCRIPTION = (
    "The response; with stream: true, OpenAI's events, the last of them response.completed or response.incomplete. A "
    "failure on the way is an event response.failed, after which the connection is closed"
)
Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)


class OutputText(_Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(_Shape):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(_Shape):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Shape):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCall(_Shape):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomToolCall(_Shape):
    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class InputDetails(_Shape):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(_Shape):
    reasoning_tokens: int


class ResponseSlo(_Shape):
    """Latencies measured by the server, in ms."""

    ttft_ms: float | None
    tpot_ms: float | None
    met: bool | None
    why: RequestWhy | None = None


class ResponseUsage(_Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    slo: ResponseSlo | None = None


class IncompleteDetails(_Shape):
    reason: Literal["max_output_tokens", "timeout"]


class ResponseReasoning(_Shape):
    effort: str | None
    summary: None


class ResponseError(_Shape):
    code: str
    message: str
    retryable: bool | None = None
    retry_after_s: int | None = None


class DeletedResponse(_Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(_Shape):
    """Items of the input as sent, with ids."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(_Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseObject(_Shape):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCall | CustomToolCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    warnings: list[str] | None = None
