"""Request bodies, and the way from their fields to `SamplingParams`.

Null means "not given" everywhere; unknown fields are kept apart and named in `warnings`. Ranges are checked where the
values are used (`SamplingParams`, and the second half of this file), so that each has one home.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from roseinfer.core.request import context_error
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.prepare import spell_out
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.server.http.limits import Limits
from roseinfer.text.tokenizer import Tokenizer

MAX_LISTED_ERRORS = 10
MAX_ERROR_CHARS = 300
# Far above what `Limits` allows: here it is only to bound what parsing costs. Plain lists of token ids cost little.
MAX_ITEMS = 65536
# Of lists of objects, which cost more. Below `Limits.max_json_objects`, for an error that names the field.
MAX_OBJECTS = 16000


def _short(value: Any) -> Any:
    """Pydantic measures a dict after it has parsed it, and notes an error for each wrong entry."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise ValueError(f"Dictionary should have at most {MAX_ITEMS} items, not {len(value)}")
    return value


# A long list of wrong entries must not cost an error each.
TokenIds = Annotated[list[int], Field(fail_fast=True, description="token ids within the vocabulary")]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_ITEMS)]
Strings = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_OBJECTS)]
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
    why: bool | None = Field(None, description="tell there what it waited for too; default false")


class JsonSchemaFormat(RequestModel):
    name: str | None = Field(None, description="required: 1 to 64 letters, digits, '_' or '-'")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="required: a JSON schema")
    strict: bool | None = Field(None, description="refuse what cannot be enforced; default: ignore it, with a warning")
    description: str | None = Field(None, description="accepted, not used")


class ResponseFormat(RequestModel):
    type: str = Field(description="text, json_object, json_schema or structural_tag")
    json_schema: JsonSchemaFormat | None = Field(None, description="of type json_schema")
    format: dict[str, Any] | None = Field(None, description="of type structural_tag: a tree of nodes")
    structures: Parts | None = Field(None, description="of type structural_tag: {begin, schema, end}, several")
    triggers: Strings | None = Field(None, description="of type structural_tag: with what structures begin")


class StructuredOutputs(RequestModel):
    """One of the first six."""

    json_: str | dict[str, Any] | None = Field(
        None, alias="json", description="a JSON schema, or a text that holds one"
    )
    regex: str | None = Field(None, description="a regular expression that the text matches as a whole")
    choice: Strings | None = Field(None, description="texts, one of which is the output")
    grammar: str | None = Field(None, description="a grammar in Lark, or in GBNF if there is a '::=' in it")
    json_object: bool | None = Field(None, description="true: any JSON object")
    structural_tag: str | dict[str, Any] | None = Field(None, description="as in response_format")
    whitespace_pattern: str | None = Field(
        None, description="what may stand between the symbols of JSON; default: up to 32 characters of white space"
    )
    disable_any_whitespace: bool | None = Field(None, description="no white space between the symbols of JSON")
    disable_additional_properties: bool | None = Field(
        None, description="no properties that a schema does not name, where it does not say"
    )


class ModelField(RequestModel):
    model: str | None = Field(None, description="a served model; default: the first one")


class OneAnswerRequest(ModelField):
    """What all APIs have in common: how tokens are drawn, what is promised, how the answer is sent."""

    min_tokens: int | None = Field(None, description="no end of text before so many tokens; default 0")
    temperature: float | None = Field(None, description="0 (greedy) to 2; default 1")
    top_p: float | None = Field(None, description="above 0, up to 1; default 1")
    top_k: int | None = Field(None, description="-1 or 0 = off (default)")
    min_p: float | None = Field(None, description="0 (default) to 1")
    frequency_penalty: float | None = Field(None, description="-2 to 2; default 0")
    presence_penalty: float | None = Field(None, description="-2 to 2; default 0")
    repetition_penalty: float | None = Field(None, description="above 0; default 1")
    seed: int | None = Field(None, description="signed 64 bit; sample i of a prompt draws with seed + i")
    stop_token_ids: TokenIds | None = Field(None, description="token ids that end the text")
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string; default false")
    ignore_eos: bool | None = Field(None, description="go on after end-of-text tokens; default false")
    logit_bias: Biases | None = Field(None, description="token id -> -100 to 100")
    bad_words: Strings | None = Field(None, description="words that the output will not hold, as tokenized")
    allowed_token_ids: TokenIds | None = Field(
        None, description="no other tokens are sampled; default: all are allowed"
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="use the prompt's last so many tokens; -1 = as many as leave room for max_tokens"
    )
    stream: bool | None = Field(None, description="answer as server-sent events")
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


class GenerationRequest(OneAnswerRequest):
    """What completions and chat completions have in common."""

    n: int | None = Field(None, description="samples per prompt; default 1")
    stop: str | Strings | None = Field(None, description="strings that end the text")
    prompt_logprobs: int | None = Field(None, description="alternatives per prompt token; not with stream")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    return_token_ids: bool | None = Field(None, description="return the token ids of prompt and output too")
    return_tokens_as_token_ids: bool | None = Field(None, description="name tokens 'token_id:N' in logprobs")
    user: str | None = Field(None, description="accepted, not used")
    response_format: ResponseFormat | None = Field(None, description="how the output is written; default: freely")
    structured_outputs: StructuredOutputs | None = Field(None, description="what the output follows")
    guided_json: str | dict[str, Any] | None = Field(None, description="like structured_outputs.json")
    guided_regex: str | None = Field(None, description="like structured_outputs.regex")
    guided_choice: Strings | None = Field(None, description="like structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="like structured_outputs.grammar")
    guided_whitespace_pattern: str | None = Field(None, description="like structured_outputs.whitespace_pattern")
    guided_decoding_backend: str | None = Field(None, description="accepted, not used")


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | Strings | TokenIdLists = Field(description="text or token ids, one or several")
    max_tokens: int | None = Field(None, description="default 16; 0 only with echo, to score the prompt")
    logprobs: int | None = Field(None, description="alternatives per token")
    echo: bool | None = Field(None, description="put the prompt before the text; default false")


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_OBJECTS)]


class ChatMessage(RequestModel):
    role: str
    content: str | Parts | None = Field(None, description="text, or parts of type 'text'; null beside tool_calls")
    name: str | None = None
    tool_calls: Objects | None = Field(None, description="an assistant's: {id, type, function: {name, arguments}}")
    tool_call_id: str | None = Field(None, description="the call that a message of role 'tool' answers")
    reasoning_content: str | None = Field(None, description="what the assistant thought")
    reasoning: str | None = Field(None, description="like reasoning_content")


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_OBJECTS)]


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
    tools: Tools | None = Field(None, description="{type: function, function: {name, parameters, strict}}")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (default), required, one function, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; default true")
    reasoning_effort: str | None = Field(None, description="'none': do not think, where the template knows how")
    thinking_token_budget: int | None = Field(None, description="tokens to think with; -1 (default) = any number")
    thinking_budget: int | None = Field(None, description="like thinking_token_budget")


class TokenizeRequest(ModelField):
    prompt: str | None = Field(None, description="give this or messages")
    messages: Messages | None = None
    tools: Tools | None = Field(None, description="beside messages: as chats take them")
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
    listed = [f"{_place(d['loc'])}: {_said(d)}"[:MAX_ERROR_CHARS] for d in details[:MAX_LISTED_ERRORS]]
    if len(details) > MAX_LISTED_ERRORS:
        listed.append(f"and {len(details) - MAX_LISTED_ERRORS} more")
    loc = details[0]["loc"]
    param = _place(loc) if loc[:1] == ("slo",) else str(loc[0])[:100] if loc else None
    return bad_request("; ".join(listed), param)


def _said(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "extra_forbidden" and detail["loc"][:1] == ("slo",):
        known = ", ".join(field.alias or name for name, field in SloFields.model_fields.items())
        return f"there is no such field, only {known}"
    return str(detail["msg"])


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part)[:40] for part in loc[:5])


# --- from the fields of a request to `SamplingParams` ---------------------------------------------------------------
# An unset one of these takes the model's generation_config value first.
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LogprobsAsked:
    """Numbers of alternatives; None = no log probabilities, -1 = the whole vocabulary."""

    output: int | None
    prompt: int | None
    # The prompt's log probabilities come back as a field of their own only if that field was asked for.
    prompt_field: int | None


NO_LOGPROBS = LogprobsAsked(None, None, None)


def completion_logprobs(request: CompletionRequest, limits: Limits) -> LogprobsAsked:
    if request.logprobs is None and request.prompt_logprobs is None:
        return NO_LOGPROBS
    _check_count(request.logprobs, "logprobs", limits)
    echoed = request.logprobs if request.echo else None
    return LogprobsAsked(request.logprobs, _wider(echoed, _prompt_logprobs(request, limits)), request.prompt_logprobs)


def chat_logprobs(request: ChatRequest, limits: Limits) -> LogprobsAsked:
    _check_count(request.top_logprobs, "top_logprobs", limits)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    output = (request.top_logprobs or 0) if request.logprobs else None
    return LogprobsAsked(output, _prompt_logprobs(request, limits), request.prompt_logprobs)


def completion_max_tokens(request: CompletionRequest) -> int:
    if request.max_tokens is None:
        return DEFAULT_COMPLETION_TOKENS
    if request.max_tokens < 1 and not (request.max_tokens == 0 and request.echo):
        raise bad_request("max_tokens must be at least 1 (or 0 with echo, to score the prompt)", "max_tokens")
    return request.max_tokens


def chat_max_tokens(request: ChatRequest) -> int | None:
    """None = the rest of the context."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    value = getattr(request, name)
    if value is not None and value < 1:
        raise bad_request(f"{name} must be at least 1", name)
    return value


def sampling_params(
    request: GenerationRequest, max_tokens: int | None, asked: LogprobsAsked, info: EngineInfo, limits: Limits
) -> SamplingParams:
    """Checks everything but the length of the prompt, see `fit`. `max_tokens` None = the rest of the context.

    Raises `InvalidRequestError` or `ApiError` 400 naming the field.
    """
    fields: dict[str, Any] = {
        "max_tokens": info.facts.max_model_len if max_tokens is None else max_tokens,
        "logprobs": asked.output,
        "prompt_logprobs": asked.prompt,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    if request.stop is not None:
        fields["stop"] = _stop_strings(request.stop, limits)
    if request.stop_token_ids is not None:
        fields["stop_token_ids"] = _stop_token_ids(request.stop_token_ids, info, limits)
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias, info, limits)
    if request.bad_words is not None:
        fields["bad_words"] = _bad_words(request.bad_words, limits)
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = _allowed_token_ids(request.allowed_token_ids, info, limits)
    for name in _PLAIN:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    for name in _MODEL_DEFAULTS:
        value = getattr(request, name)
        value = info.facts.default_sampling.get(name) if value is None else value
        if value is not None:
            fields[name] = value
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    return SamplingParams(**fields)


def fit(params: SamplingParams, prompt_len: int, max_model_len: int, param: str = "prompt") -> SamplingParams:
    """Clamps the output to what the context leaves.

    Raises `RequestTooLongError` naming `param`, where the prompt came from, if it leaves nothing.
    """
    room = max_model_len - prompt_len
    if room < min(1, params.max_tokens):
        but = f"the prompt has {prompt_len} tokens, which leaves no room for an output"
        raise context_error(max_model_len, but, param, prompt_len)
    if params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _prompt_logprobs(request: GenerationRequest, limits: Limits) -> int | None:
    _check_count(request.prompt_logprobs, "prompt_logprobs", limits)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    return request.prompt_logprobs


def _check_count(value: int | None, name: str, limits: Limits) -> None:
    if value is None or (limits.max_logprobs == -1 and value >= -1):
        return
    if not 0 <= value <= limits.max_logprobs:
        raise bad_request(f"{name} must be within [0, {limits.max_logprobs}], got {value}", name)


def _wider(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return -1 if -1 in (a, b) else max(a, b)


def _stop_strings(stop: str | list[str], limits: Limits) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > limits.max_stop_strings:
        raise bad_request(f"stop holds {len(stops)} strings, at most {limits.max_stop_strings} are allowed", "stop")
    if any(len(text) > limits.max_stop_chars for text in stops):
        raise bad_request(f"a stop string is longer than {limits.max_stop_chars} characters", "stop")
    return tuple(stops)


def _stop_token_ids(ids: list[int], info: EngineInfo, limits: Limits) -> tuple[int, ...]:
    if len(ids) > limits.max_stop_token_ids:
        raise bad_request(f"stop_token_ids holds more than {limits.max_stop_token_ids} entries", "stop_token_ids")
    for token in ids:
        _check_token(token, "stop_token_ids", info)
    return tuple(ids)


def _logit_bias(bias: dict[str, float], info: EngineInfo, limits: Limits) -> tuple[tuple[int, float], ...]:
    if len(bias) > limits.max_logit_bias:
        raise bad_request(f"logit_bias holds more than {limits.max_logit_bias} entries", "logit_bias")
    pairs = []
    for key, value in bias.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 12:
            raise bad_request("logit_bias: the keys must be token ids", "logit_bias")
        _check_token(int(key), "logit_bias", info)
        pairs.append((int(key), value))
    return tuple(pairs)


def _bad_words(words: list[str], limits: Limits) -> tuple[str, ...]:
    if len(words) > limits.max_bad_words:
        raise bad_request(
            f"bad_words holds {len(words)} words, at most {limits.max_bad_words} are allowed", "bad_words"
        )
    if sum(map(len, words)) > limits.max_bad_words_chars:
        raise bad_request(f"bad_words holds more than {limits.max_bad_words_chars} characters", "bad_words")
    return tuple(words)


def spelled_out(params: SamplingParams, tokenizer: Tokenizer, limits: Limits) -> SamplingParams:
    """`bad_words` as token ids; not for the event loop. Raises `InvalidRequestError` or `ApiError` 400."""
    params = spell_out(params, tokenizer)
    if sum(map(len, params.bad_token_ids)) > limits.max_bad_words_tokens:
        raise bad_request(f"bad_words holds more than {limits.max_bad_words_tokens} tokens", "bad_words")
    return params


def _allowed_token_ids(ids: list[int], info: EngineInfo, limits: Limits) -> tuple[int, ...]:
    if len(ids) > limits.max_allowed_token_ids:
        message = f"allowed_token_ids holds more than {limits.max_allowed_token_ids} entries"
        raise bad_request(message, "allowed_token_ids")
    for token in ids:
        _check_token(token, "allowed_token_ids", info)
    return tuple(ids)


def _check_token(token: int, name: str, info: EngineInfo) -> None:
    if not 0 <= token < info.facts.vocab_size:
        raise bad_request(f"{name}: token id {token} is not within the vocabulary of {info.facts.vocab_size}", name)
