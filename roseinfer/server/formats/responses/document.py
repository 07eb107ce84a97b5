"""Models of the answers of /v1/responses for the OpenAPI document."""

from typing import Any, Literal

from roseinfer.server.formats.request_document import AnswerModel, MeasuredSlo
from roseinfer.server.formats.responses.client_arguments import LocalShellAction, PatchOperation, ShellAction

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


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(AnswerModel):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(AnswerModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(AnswerModel):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCall(AnswerModel):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomToolCall(AnswerModel):
    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ShellEnvironment(AnswerModel):
    type: Literal["local"]


class ShellCall(AnswerModel):
    type: Literal["shell_call"]
    id: str
    status: Status
    call_id: str
    action: ShellAction
    environment: ShellEnvironment


class LocalShellCall(AnswerModel):
    type: Literal["local_shell_call"]
    id: str
    status: Status
    call_id: str
    action: LocalShellAction


class ApplyPatchCall(AnswerModel):
    type: Literal["apply_patch_call"]
    id: str
    status: Status
    call_id: str
    operation: PatchOperation


Call = FunctionCall | CustomToolCall | ShellCall | LocalShellCall | ApplyPatchCall


class InputDetails(AnswerModel):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(AnswerModel):
    reasoning_tokens: int


class ResponseSlo(MeasuredSlo):
    """Latencies measured by the server, in ms."""


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    slo: ResponseSlo | None = None


class IncompleteDetails(AnswerModel):
    reason: Literal["max_output_tokens", "timeout"]


class ResponseReasoning(AnswerModel):
    effort: str | None
    summary: None


class ResponseError(AnswerModel):
    code: str
    message: str
    retryable: bool | None = None
    retry_after_s: int | None = None


class DeletedResponse(AnswerModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(AnswerModel):
    """Items of the input as sent, with ids."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(AnswerModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseObject(AnswerModel):
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
    output: list[OutputMessage | ReasoningItem | Call]
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
