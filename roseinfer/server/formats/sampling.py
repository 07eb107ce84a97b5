"""From the fields of a request to `SamplingParams`."""

from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.request import context_error
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.prepare import spell_out
from roseinfer.server.formats.schemas import ChatRequest, CompletionRequest, GenerationRequest
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.limits import Limits
from roseinfer.text.tokenizer import Tokenizer

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


def completion_logprobs(request: CompletionRequest, limits: Limits) -> LogprobsAsked:
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
    if max_tokens is not None and max_tokens > info.max_model_len:
        newer = getattr(request, "max_completion_tokens", None) is not None
        name = "max_completion_tokens" if newer else "max_tokens"
        raise context_error(info.max_model_len, f"{name} is {max_tokens}", name)
    fields: dict[str, Any] = {
        "max_tokens": info.max_model_len if max_tokens is None else max_tokens,
        "logprobs": asked.output,
        "prompt_logprobs": asked.prompt,
        "stop": _stop_strings(request.stop, limits),
        "stop_token_ids": _stop_token_ids(request.stop_token_ids, info, limits),
        "logit_bias": _logit_bias(request.logit_bias, info, limits),
        "bad_words": _bad_words(request.bad_words, limits),
        "allowed_token_ids": _allowed_token_ids(request.allowed_token_ids, info, limits),
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    fields |= _given(request, _PLAIN, {})
    fields |= _given(request, _MODEL_DEFAULTS, info.default_sampling)
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
        raise context_error(max_model_len, but, param)
    if params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _given(request: GenerationRequest, names: tuple[str, ...], defaults: dict[str, float | int]) -> dict[str, Any]:
    values = {}
    for name in names:
        value = getattr(request, name)
        value = defaults.get(name) if value is None else value
        if value is not None:
            values[name] = value
    return values


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


def _stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > limits.max_stop_strings:
        raise bad_request(f"stop holds {len(stops)} strings, at most {limits.max_stop_strings} are allowed", "stop")
    if any(len(text) > limits.max_stop_chars for text in stops):
        raise bad_request(f"a stop string is longer than {limits.max_stop_chars} characters", "stop")
    return tuple(stops)


def _stop_token_ids(ids: list[int] | None, info: EngineInfo, limits: Limits) -> tuple[int, ...]:
    if ids is not None and len(ids) > limits.max_stop_token_ids:
        raise bad_request(f"stop_token_ids holds more than {limits.max_stop_token_ids} entries", "stop_token_ids")
    for token in ids or ():
        _check_token(token, "stop_token_ids", info)
    return tuple(ids or ())


def _logit_bias(bias: dict[str, float] | None, info: EngineInfo, limits: Limits) -> tuple[tuple[int, float], ...]:
    if bias is not None and len(bias) > limits.max_logit_bias:
        raise bad_request(f"logit_bias holds more than {limits.max_logit_bias} entries", "logit_bias")
    pairs = []
    for key, value in (bias or {}).items():
        if not key.isdecimal() or not key.isascii() or len(key) > 12:
            raise bad_request("logit_bias: the keys must be token ids", "logit_bias")
        _check_token(int(key), "logit_bias", info)
        pairs.append((int(key), value))
    return tuple(pairs)


def _bad_words(words: list[str] | None, limits: Limits) -> tuple[str, ...]:
    words = words or []
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


def _allowed_token_ids(ids: list[int] | None, info: EngineInfo, limits: Limits) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if len(ids) > limits.max_allowed_token_ids:
        message = f"allowed_token_ids holds more than {limits.max_allowed_token_ids} entries"
        raise bad_request(message, "allowed_token_ids")
    for token in ids:
        _check_token(token, "allowed_token_ids", info)
    return tuple(ids)


def _check_token(token: int, name: str, info: EngineInfo) -> None:
    if not 0 <= token < info.vocab_size:
        raise bad_request(f"{name}: token id {token} is not within the vocabulary of {info.vocab_size}", name)
