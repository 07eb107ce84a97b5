"""Models of answers for the OpenAPI document. Tests validate answers with them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from roseinfer.core.slo import Cause
from roseinfer.server.formats.request_document import AnswerModel, MeasuredSlo


class ErrorFields(AnswerModel):
    message: str
    type: str
    param: str | None
    code: str | None
    retryable: bool
    retry_after_s: int | None = None
    reason: Literal["ttft", "tpot", "e2e"] | None = None
    cause: Cause | None = None
    predicted_ttft_ms: float | None = None
    attainable_ms: float | None = None


class ErrorBody(AnswerModel):
    error: ErrorFields


class CachedTokens(AnswerModel):
    cached_tokens: int


class CompletionTokensDetails(AnswerModel):
    """Reasoning tokens, for models with reasoning and requests with tools; drafts from the request's `prediction`."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class SloUsage(MeasuredSlo):
    """Latencies measured by the server, in ms; the worst of all choices."""


class UsageFields(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokensDetails | None = None
    slo: SloUsage | None = None


class CompletionLogprobsFields(AnswerModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(AnswerModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(AnswerModel):
    index: int
    text: str
    logprobs: CompletionLogprobsFields | None
    finish_reason: Literal["stop", "length", "timeout"]
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(AnswerModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFields
    warnings: list[str] | None = None


class TopLogprob(AnswerModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    content: list[ChatLogprob]


class CalledFunction(AnswerModel):
    """Called function. `arguments`: JSON written by the model; cut if the answer ended with `length`."""

    name: str
    arguments: str


class ToolCall(AnswerModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(AnswerModel):
    """Message of the assistant. `content` is null only without text and with calls. Reasoning has two names."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(AnswerModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "timeout"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(AnswerModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFields
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    warnings: list[str] | None = None


class ModelCard(AnswerModel):
    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    lifecycle: Literal["active"]
    created: int
    created_at: str
    max_input_tokens: int
    max_tokens: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    dtype: str
    weights: str
    kv_cache: str
    default_sampling: dict[str, float | int]
    task: Literal["generate", "embed", "score"]
    embedding_dimensions: int | None


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False]


class AdapterCard(AnswerModel):
    """LoRA adapter. `digest`: SHA-256 of its content. `bytes`: its size in host memory."""

    id: str
    object: Literal["lora_adapter"]
    parent: str
    digest: str
    rank: int
    bytes: int


class AdapterList(AnswerModel):
    object: Literal["list"]
    data: list[AdapterCard]


class DeletedAdapter(AnswerModel):
    id: str
    object: Literal["lora_adapter"]
    deleted: Literal[True]


class Tokenized(AnswerModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    warnings: list[str] | None = None


class Detokenized(AnswerModel):
    prompt: str
    warnings: list[str] | None = None


class TokenizerInfo(BaseModel):
    """tokenizer_config.json of the model, with the active chat template and special tokens as texts."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None


class EngineHealthModel(AnswerModel):
    """Health of one of several engines. `model`: only with several models."""

    engine: int
    model: str | None = None
    state: Literal["starting", "ready", "draining", "quiet", "dead"]
    heartbeat_age_s: float
    restarts: int


class Health(AnswerModel):
    """Status of the server. `engines`: only with several."""

    status: str
    engines: list[EngineHealthModel] | None = None


class Version(AnswerModel):
    version: str


class EngineLoad(AnswerModel):
    """Load of one of several engines: running and waiting sequences, and the used share of KV blocks.

    `model`: only with several models.
    """

    engine: int
    model: str | None = None
    running: int
    waiting: int
    kv_cache_usage: float


class Load(AnswerModel):
    """Load of the server. `engines`: only with several."""

    server_load: int
    engines: list[EngineLoad] | None = None


class EngineLoadReport(AnswerModel):
    """Load of one engine, with SGLang's field names.

    `num_waiting_uncached_tokens`: of waiting prompts, null = unknown. `num_used_tokens`: capacity of used KV blocks.
    `gen_throughput`: rows per second of the newest step. `utilization`: share of the machine needed for objectives,
    else used share of the seats. `model`: only with several models.
    """

    dp_rank: int
    model: str | None = None
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int | None
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int


class EngineLoads(AnswerModel):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[EngineLoadReport]


class EnginePromise(AnswerModel):
    """Forecast of one engine. `kept`: the objectives can be met; null without objectives."""

    engine: int
    kept: bool | None
    predicted_ttft_ms: float
    utilisation: float


class PromiseAnswer(AnswerModel):
    """Forecast of the best engine and of all, best first; null and empty without a cost model."""

    prompt_tokens: int
    kept: bool | None
    engine: int | None
    predicted_ttft_ms: float | None
    engines: list[EnginePromise]
