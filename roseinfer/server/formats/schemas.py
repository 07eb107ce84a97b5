"""Request bodies. Null means "not given" everywhere; unknown fields are kept apart and named in `warnings`.

Ranges are checked where the values are used (`SamplingParams` and `server.sampling`), so that each has one home.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from roseinfer.server.http.errors import ApiError, bad_request

MAX_LISTED_ERRORS = 10
MAX_ERROR_CHARS = 300
# Far above what `Limits` allows: here it is only to bound what parsing costs. Plain lists of token ids cost little.
MAX_ITEMS = 65536


def _short(value: Any) -> Any:
    """Pydantic measures a dict after it has parsed it, and notes an error for each wrong entry."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise ValueError(f"Dictionary should have at most {MAX_ITEMS} items, not {len(value)}")
    return value


# A long list of wrong entries must not cost an error each.
TokenIds = Annotated[list[int], Field(fail_fast=True, description="token ids within the vocabulary")]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_ITEMS)]
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ITEMS)]
Biases = Annotated[dict[str, float], BeforeValidator(_short)]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="send the usage in a last chunk of its own")
    continuous_usage_stats: bool | None = Field(None, description="send the usage so far in every chunk")


class SloFields(RequestModel):
    """Latency objectives. A name that is not here would be a promise that nobody keeps, so it is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: float | None = Field(None, description="from arrival to the first token")
    tpot_ms: float | None = Field(None, description="mean time per token after the first")
    e2e_ms: float | None = Field(None, description="from arrival to the last token")
    class_: str | None = Field(None, alias="class", description="a class of the server's; 'none' = best effort")
    report: bool | None = Field(None, description="tell in usage.slo how the objectives were kept; default false")


class ModelField(RequestModel):
    model: str | None = Field(None, description="a served model; default: the first one")


class GenerationRequest(ModelField):
    """What completions and chat completions have in common."""

    min_tokens: int | None = Field(None, description="no end of text before so many tokens; default 0")
    temperature: float | None = Field(None, description="0 (greedy) to 2; default 1")
    top_p: float | None = Field(None, description="above 0, up to 1; default 1")
    top_k: int | None = Field(None, description="-1 or 0 = off (default)")
    min_p: float | None = Field(None, description="0 (default) to 1")
    frequency_penalty: float | None = Field(None, description="-2 to 2; default 0")
    presence_penalty: float | None = Field(None, description="-2 to 2; default 0")
    repetition_penalty: float | None = Field(None, description="above 0; default 1")
    seed: int | None = Field(None, description="signed 64 bit; sample i of a prompt draws with seed + i")
    n: int | None = Field(None, description="samples per prompt; default 1")
    stop: str | Strings | None = Field(None, description="strings that end the text")
    stop_token_ids: TokenIds | None = Field(None, description="token ids that end the text")
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string; default false")
    ignore_eos: bool | None = Field(None, description="go on after end-of-text tokens; default false")
    prompt_logprobs: int | None = Field(None, description="alternatives per prompt token; not with stream")
    logit_bias: Biases | None = Field(None, description="token id -> -100 to 100")
    bad_words: Strings | None = Field(None, description="words that the output will not hold, as tokenized")
    allowed_token_ids: TokenIds | None = Field(
        None, description="no other tokens are sampled; default: all are allowed"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="use the prompt's last so many tokens; -1 = as many as leave room for max_tokens"
    )
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    stream_interval: int | None = Field(None, description="tokens per chunk, at least; default 1")
    slo: SloFields | None = Field(None, description="latency objectives; default: the class's")
    ttft: float | None = Field(None, description="like slo.ttft_ms")
    tpot: float | None = Field(None, description="like slo.tpot_ms")
    pred_output_len: int | None = Field(None, description="output tokens, as the client guesses")
    timeout_s: float | None = Field(None, description="seconds from arrival after which the request ends")
    deadline_ms: float | None = Field(None, description="like timeout_s, in milliseconds")
    service_tier: str | None = Field(None, description="names a class, if the server's file says so")
    priority: int | None = Field(None, description="lower is sooner; only with policies that know priorities")
    cache_salt: str | None = Field(None, description="only requests with the same salt share cached prefixes")
    request_id: str | None = Field(None, description="used if there is no X-Request-Id header")
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; default true")
    return_token_ids: bool | None = Field(None, description="return the token ids of prompt and output too")
    return_tokens_as_token_ids: bool | None = Field(None, description="name tokens 'token_id:N' in logprobs")
    user: str | None = Field(None, description="accepted, not used")


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | Strings | TokenIdLists = Field(description="text or token ids, one or several")
    max_tokens: int | None = Field(None, description="default 16; 0 only with echo, to score the prompt")
    logprobs: int | None = Field(None, description="alternatives per token")
    echo: bool | None = Field(None, description="put the prompt before the text; default false")


class ChatMessage(RequestModel):
    role: str
    content: str | Parts | None = Field(None, description="text, or parts of type 'text'")
    name: str | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_ITEMS)]


class MessagesFields(RequestModel):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = Field(None, description="default false; go on with the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables that the template reads")


class ChatRequest(MessagesFields, GenerationRequest):
    max_tokens: int | None = Field(None, description="default: the rest of the context")
    max_completion_tokens: int | None = Field(None, description="wins over max_tokens")
    logprobs: bool | None = Field(None, description="return log probabilities; default false")
    top_logprobs: int | None = Field(None, description="alternatives per token; needs logprobs")


class TokenizeRequest(ModelField):
    prompt: str | None = Field(None, description="give this or messages")
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelField):
    tokens: TokenIds


Model = TypeVar("Model", bound=RequestModel)


def parse(kind: type[Model], body: dict[str, Any]) -> Model:
    """Raises `ApiError` 400 with a bounded message that names the fields."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _as_bad_request(error) from None


def unknown_fields(request: RequestModel) -> dict[str, Any]:
    """Fields that no schema names, but only those that say something (null = not given)."""
    return {name: value for name, value in (request.model_extra or {}).items() if value is not None}


def _as_bad_request(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    listed = [f"{_place(d['loc'])}: {d['msg']}"[:MAX_ERROR_CHARS] for d in details[:MAX_LISTED_ERRORS]]
    if len(details) > MAX_LISTED_ERRORS:
        listed.append(f"and {len(details) - MAX_LISTED_ERRORS} more")
    loc = details[0]["loc"]
    param = _place(loc) if loc[:1] == ("slo",) else str(loc[0])[:100] if loc else None
    return bad_request("; ".join(listed), param)


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part)[:40] for part in loc[:5])
