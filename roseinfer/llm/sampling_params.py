"""Sampling parameters of a request as `LLM` takes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.sampling import SequenceParams
from roseinfer.llm.structured_outputs import StructuredOutputsParams

# Fields of vLLM that are accepted only if they ask for nothing -> what to use, or why.
_UNSUPPORTED = {
    "best_of": "use n",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias or allowed_token_ids",
    "extra_args": "no plugin reads them",
}
# Fields that the core takes unchanged.
_PLAIN = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)
_TEXTS = "a text or a list of texts"
_LISTS = ("stop_token_ids", "bad_words", "allowed_token_ids")
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
# Samples of a prompt, as in vLLM. A mistyped number would fill the memory before anything runs.
MAX_SAMPLES_COUNT = 16_384


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling and stopping of a request. Fields may be set later; `LLM` checks them again.

    Args:
        n: samples per prompt, up to 16384. Sample i draws with `seed` + i.
        max_tokens: maximum number of output tokens; None = the rest of the context, which is the limit in any case.
        min_tokens: number of tokens before which the output does not end.
        temperature: 0 = greedy, up to 2.
        top_p: sample among the most likely tokens with this total probability; above 0, up to 1.
        top_k: sample among this many most likely tokens; 0 or -1 = all.
        min_p: sample among tokens at least this likely relative to the most likely one; 0 to 1.
        repetition_penalty: above 1, tokens of prompt and output become less likely.
        presence_penalty: subtracted from logits of tokens that the output contains; -2 to 2.
        frequency_penalty: subtracted for each occurrence in the output; -2 to 2.
        seed: same seed, same output; None = drawn by the engine from its own seed.
        stop: a text, or several, that ends the output.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the text or token that ended the output.
        ignore_eos: continue after the model's end-of-text tokens.
        bad_words: texts that the output must not contain, as they are tokenised.
        bad_token_ids: sequences of token ids that the output must not contain.
        allowed_token_ids: sample only these; end-of-text tokens must be listed, too. None = all.
        logit_bias: token id -> number to add to its logit, -100 to 100.
        logprobs: number of most likely tokens whose log probabilities are returned with each output token; 0 = the
            token alone, -1 = the whole vocabulary, None = no log probabilities.
        prompt_logprobs: the same for prompt tokens.
        structured_outputs: constraint of the output.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False: outputs have token ids and no text; `stop` needs the text.
        truncate_prompt_tokens: number of the prompt's last tokens to use; -1 = as many as leave room for the output.
        best_of: not supported.
        logits_processors: not supported.
        guided_decoding: not supported; see `structured_outputs`.
        extra_args: not supported.
        output_kind: no effect: `generate` returns whole outputs, `stream` new tokens.
        flat_logprobs: no effect.
        spaces_between_special_tokens: no effect.
        skip_reading_prefix_cache: no effect: a cached prefix does not change outputs.

    Raise `InvalidRequestError`, a `ValueError`, that names a field with an invalid value.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] | None = None
    bad_token_ids: Sequence[Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    best_of: int | None = field(default=None, repr=False)
    logits_processors: Any = field(default=None, repr=False)
    guided_decoding: Any = field(default=None, repr=False)
    extra_args: Any = field(default=None, repr=False)
    output_kind: Any = field(default=None, repr=False)
    flat_logprobs: bool = field(default=False, repr=False)
    spaces_between_special_tokens: bool = field(default=True, repr=False)
    skip_reading_prefix_cache: bool | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.for_sequence(max_tokens=max(1, self.min_tokens if isinstance(self.min_tokens, int) else 0))

    def for_sequence(self, max_tokens: int) -> SequenceParams:
        """Return the parameters of one sample. `max_tokens`: used if these have none.

        Raise `InvalidRequestError` that names the field.
        """
        self._check()
        values: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        values |= {name: _as_tuple(name, value) for name in _LISTS if (value := getattr(self, name)) is not None}
        if self.stop:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, _TEXTS)
        if self.bad_token_ids:
            sequences = _as_tuple("bad_token_ids", self.bad_token_ids)
            values["bad_token_ids"] = tuple(_as_tuple("bad_token_ids", sequence) for sequence in sequences)
        if self.logit_bias:
            values["logit_bias"] = _biases(self.logit_bias)
        values["max_tokens"] = max_tokens if self.max_tokens is None else self.max_tokens
        return SequenceParams(**values)

    def _check(self) -> None:
        """Check the fields that the core does not know."""
        for name, hint in _UNSUPPORTED.items():
            if getattr(self, name) and not (name == "best_of" and self.best_of == self.n):
                raise InvalidRequestError(f"{name} is not supported: {hint}; see docs/reference/python.md", name)
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise InvalidRequestError(f"n must be a positive integer, got {self.n!r}", "n")
        if self.n > MAX_SAMPLES_COUNT:
            raise InvalidRequestError(f"n must be at most {MAX_SAMPLES_COUNT}, got {self.n}", "n")
        if isinstance(self.top_k, int) and self.top_k < -1:
            raise InvalidRequestError(f"top_k must be at least -1, got {self.top_k}", "top_k")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}", name)
        if not self.detokenize and self.stop:
            raise InvalidRequestError("stop needs detokenize, as it is found in the text", "stop")
        outputs = self.structured_outputs
        if outputs is not None and not isinstance(outputs, StructuredOutputsParams):
            kind = type(outputs).__name__
            message = f"structured_outputs must be StructuredOutputsParams, got {kind}"
            raise InvalidRequestError(message, "structured_outputs")


def _as_tuple(name: str, value: Any, expected: str = "a list") -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be {expected}, got {type(value).__name__}", name)
    return tuple(value)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias; ids may be text, as in JSON."""
    try:
        return tuple((int(token), bias) for token, bias in given.items())
    except (AttributeError, TypeError, ValueError):
        raise InvalidRequestError("logit_bias must be a dictionary of token ids and numbers", "logit_bias") from None
