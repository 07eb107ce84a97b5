"""Sampling parameters of a request, from its fields and the model's defaults."""

from dataclasses import dataclass, replace
from typing import Any

from roseinfer.core.request import kept_prompt_tokens
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.live import resolve_bad_words
from roseinfer.server.formats.schemas import ChatRequest, CompletionRequest, GenerationRequest
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.limits import Limits
from roseinfer.text.tokenizer import Tokenizer

# Fields of the same name in `SequenceParams`. The model has defaults for the first five.
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
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
class RequestedLogprobs:
    """Numbers of alternatives; None = no log probabilities, -1 = the whole vocabulary."""

    output: int | None
    prompt: int | None
    # Set only if the answer has the prompt's log probabilities in a field of their own.
    prompt_field: int | None


NO_LOGPROBS = RequestedLogprobs(None, None, None)


def completion_logprobs(request: CompletionRequest) -> RequestedLogprobs:
    """Return the log probabilities that a completion asks for. Raises `ApiError` 400."""
    if request.logprobs is None and request.prompt_logprobs is None:
        return NO_LOGPROBS
    echoed = request.logprobs if request.echo else None
    return RequestedLogprobs(request.logprobs, _wider(echoed, _prompt_logprobs(request)), request.prompt_logprobs)


def chat_logprobs(request: ChatRequest) -> RequestedLogprobs:
    """Return the log probabilities that a chat asks for. Raises `ApiError` 400."""
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if not request.logprobs and request.prompt_logprobs is None:
        return NO_LOGPROBS
    output = (request.top_logprobs or 0) if request.logprobs else None
    return RequestedLogprobs(output, _prompt_logprobs(request), request.prompt_logprobs)


def _prompt_logprobs(request: GenerationRequest) -> int | None:
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    return request.prompt_logprobs


def _wider(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return -1 if -1 in (a, b) else max(a, b)


def completion_max_tokens(request: CompletionRequest) -> int:
    if request.max_tokens is None:
        return DEFAULT_COMPLETION_TOKENS
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens must be at least 1 (or 0 with echo, to score the prompt)", "max_tokens")
    return request.max_tokens


def sampling_params(
    request: GenerationRequest, max_tokens: int | None, logprobs: RequestedLogprobs, info: EngineInfo, limits: Limits
) -> tuple[SequenceParams, int | None]:
    """Return the parameters, and how many tokens at the end of each prompt to keep (None = all).

    `max_tokens` None = the rest of the context. `fit_context` adapts the result to a prompt. Raises
    `InvalidRequestError` or `ApiError` 400 naming the field.
    """
    context = info.facts.max_model_len
    fields: dict[str, Any] = {
        "max_tokens": context if max_tokens is None else max_tokens,
        "logprobs": logprobs.output,
        "prompt_logprobs": logprobs.prompt,
        "truncate_prompt_tokens": request.truncate_prompt_tokens,
    }
    if request.stop is not None:
        fields["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        fields["stop_token_ids"] = _checked_tokens(request.stop_token_ids, "stop_token_ids", info)
    if request.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(request.logit_bias, info)
    if request.bad_words is not None:
        fields["bad_words"] = _bad_words(request.bad_words, limits)
    if request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = _checked_tokens(request.allowed_token_ids, "allowed_token_ids", info)
    for name in _SAME_NAME:
        value = getattr(request, name)
        value = info.facts.default_sampling.get(name) if value is None else value
        if value is not None:
            fields[name] = value
    params = SequenceParams(**fields)
    if params.truncate_prompt_tokens is None:
        return params, None
    # The server truncates prompts. "The rest of the context" is at least one token of output.
    kept = kept_prompt_tokens(params.truncate_prompt_tokens, 1 if max_tokens is None else max_tokens, context)
    return replace(params, truncate_prompt_tokens=None), kept


def with_bad_token_ids(params: SequenceParams, tokenizer: Tokenizer, limits: Limits) -> SequenceParams:
    """Turn `bad_words` into token ids. Too slow for the event loop. Raises `InvalidRequestError` or `ApiError` 400."""
    params = resolve_bad_words(params, tokenizer)
    if sum(map(len, params.bad_token_ids)) > limits.max_bad_words_tokens:
        raise bad_request(f"bad_words has more than {limits.max_bad_words_tokens} tokens", "bad_words")
    return params


def _bad_words(words: list[str], limits: Limits) -> tuple[str, ...]:
    if sum(map(len, words)) > limits.max_bad_words_chars:
        raise bad_request(f"bad_words has more than {limits.max_bad_words_chars} characters", "bad_words")
    return tuple(words)


def _logit_bias(bias: dict[str, float], info: EngineInfo) -> tuple[tuple[int, float], ...]:
    if not all(key.isdecimal() and key.isascii() and len(key) <= 12 for key in bias):
        raise bad_request("logit_bias: the keys must be token ids", "logit_bias")
    return tuple(zip(_checked_tokens(list(map(int, bias)), "logit_bias", info), bias.values(), strict=True))


def _checked_tokens(ids: list[int], name: str, info: EngineInfo) -> tuple[int, ...]:
    wrong = [token for token in ids if not 0 <= token < info.facts.vocab_size]
    if wrong:
        message = f"{name}: token id {wrong[0]} is not within the vocabulary of {info.facts.vocab_size}"
        raise bad_request(message, name)
    return tuple(ids)
