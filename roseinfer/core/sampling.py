"""Sampling parameters of a request, and when its output ends."""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from roseinfer.core.errors import InvalidRequestError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def wrap_int64(value: int) -> int:
    """Return the signed 64-bit number that differs from `value` by a multiple of 2**64."""
    span = INT64_MAX - INT64_MIN + 1
    return (value - INT64_MIN) % span + INT64_MIN


class Seeds:
    """Seeds for requests without one: the n-th draw depends only on `seed` and `stream`.

    Several sources of draws for the same engines each need a `stream` of their own.
    """

    def __init__(self, seed: int, stream: str = "") -> None:
        self._last = random.Random(f"{seed} {stream}").getrandbits(62) if stream else seed * 1_000_003

    def draw(self, samples: int) -> int:
        """Return the seed of a request. Its sample i draws with seed + i, which no other sample uses."""
        first = self._last + 1
        self._last += samples
        return wrap_int64(first)


_TUPLES = ("logit_bias", "stop", "stop_token_ids", "bad_words", "bad_token_ids", "allowed_token_ids")


class Range(NamedTuple):
    """Bounds of a number, both inclusive unless `above`: then the lower one is exclusive."""

    low: float
    high: float
    above: bool = False


RANGES = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, above=True),
    "min_p": Range(0.0, 1.0),
    # Beyond these, penalised float32 logits are no longer finite.
    "repetition_penalty": Range(0.01, 100.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "logit_bias": Range(-100.0, 100.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParams:
    """Sampling and stopping of one sequence.

    `temperature` 0 is greedy. `top_k` 0 is off; -1 becomes 0. `top_p` keeps the smallest set of most likely tokens
    whose mass reaches p (the token that crosses p is kept). `min_p` keeps tokens at least that likely relative to the
    likeliest. `repetition_penalty` covers prompt and output, `presence_penalty` and `frequency_penalty` the output
    only. `seed` None: drawn by the sender of the request. `logprobs` is the number of alternatives returned beside the
    sampled token (0 = the sampled token alone, None = none, -1 = the whole vocabulary); `prompt_logprobs` likewise for
    every prompt token but the first. Log probabilities are the model's, before temperature, penalties and filters.
    `stop` strings are matched on text, `stop_token_ids` and the model's EOS ids on tokens; the latter are not sampled
    before `min_tokens`.

    `allowed_token_ids`: only these are sampled; EOS ids must be listed, too (None = all are allowed). `bad_token_ids`:
    sequences of token ids that the output must not contain. `bad_words`: texts that are replaced by such sequences
    before the request reaches the engine (`prepare`). `truncate_prompt_tokens`: number of the prompt's last
    tokens to use, -1 = as many as leave room for `max_tokens`, None = all; also applied before the engine.

    Raise `InvalidRequestError` naming the field if a value is out of range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self._plain():
            self._check()

    def _plain(self) -> bool:
        """True if a quick look finds all fields valid, as for most requests.

        The server and the engine both check each request. This costs far less than `_check`, which reports what is
        wrong.
        """
        return (
            type(self.max_tokens) is type(self.min_tokens) is type(self.top_k) is int
            and 0 <= self.min_tokens <= self.max_tokens
            and 0 <= self.top_k <= INT64_MAX
            and type(self.temperature) is type(self.top_p) is type(self.min_p) is float
            and 0.0 <= self.temperature <= 2.0
            and 0.0 < self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
            and type(self.repetition_penalty) is float
            and self.repetition_penalty == 1.0
            and type(self.presence_penalty) is type(self.frequency_penalty) is float
            and self.presence_penalty == self.frequency_penalty == 0.0
            and (self.seed is None or (type(self.seed) is int and INT64_MIN <= self.seed <= INT64_MAX))
            and self.logprobs is None
            and self.prompt_logprobs is None
            and () == self.logit_bias == self.stop == self.stop_token_ids == self.bad_words == self.bad_token_ids
            and self.allowed_token_ids is None
            and self.truncate_prompt_tokens is None
        )

    def _check(self) -> None:
        self._make_tuples()
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name, allowed in RANGES.items():
            if name != "logit_bias":
                _check_float(name, getattr(self, name), allowed)
        _check_int("top_k", self.top_k, -1, INT64_MAX)
        if self.top_k == -1:  # "off" of vLLM and of some models
            object.__setattr__(self, "top_k", 0)
        if self.seed is not None:
            _check_int("seed", self.seed, INT64_MIN, INT64_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, -1, None)
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, None)
            _check_float("logit_bias", bias, RANGES["logit_bias"])
        if any(not isinstance(text, str) for text in self.stop):
            raise InvalidRequestError("stop must be strings", "stop")
        if not all(self.stop):
            raise InvalidRequestError("stop must not hold an empty string", "stop")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None)
        self._check_vocabulary()
        if self.truncate_prompt_tokens is not None:
            _check_truncation(self.truncate_prompt_tokens)

    def _make_tuples(self) -> None:
        """Convert lists to tuples, so that parameters can be compared and hashed. Reject a text in place of a list."""
        for name in _TUPLES:
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a list", name)
        if any(isinstance(sequence, list) for sequence in self.bad_token_ids):
            object.__setattr__(self, "bad_token_ids", tuple(map(tuple, self.bad_token_ids)))

    def _check_vocabulary(self) -> None:
        """Check the fields that restrict the choice of tokens."""
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        for token in self.allowed_token_ids or ():
            _check_int("allowed_token_ids", token, 0, None)
        if any(not isinstance(word, str) or not word for word in self.bad_words):
            raise InvalidRequestError("bad_words must be non-empty strings", "bad_words")
        if any(not sequence for sequence in self.bad_token_ids):
            raise InvalidRequestError("bad_token_ids must not hold an empty sequence", "bad_token_ids")
        for token in chain.from_iterable(self.bad_token_ids):
            _check_int("bad_token_ids", token, 0, None)

    def named_token_ids(self) -> Iterator[tuple[str, Iterable[int]]]:
        """Yield all token ids that the request names, by the field that clients know. They must be
        in the vocabulary.
        """
        if self.stop_token_ids:
            yield "stop_token_ids", self.stop_token_ids
        if self.logit_bias:
            yield "logit_bias", (token for token, _ in self.logit_bias)
        if self.allowed_token_ids is not None:
            yield "allowed_token_ids", self.allowed_token_ids
        if self.bad_token_ids:
            yield "bad_words", chain.from_iterable(self.bad_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(name: str, value: int, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer", name)
    _check_range(name, value, low, high)


def _check_truncation(value: int) -> None:
    name = "truncate_prompt_tokens"
    _check_int(name, value, None, None)
    if value != -1 and value < 1:
        raise InvalidRequestError(f"{name} must be -1 or at least 1, got {value}", name)


def _check_float(name: str, value: float, allowed: Range) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise InvalidRequestError(f"{name} must be a finite number", name)
    if allowed.above and value == allowed.low:
        raise InvalidRequestError(f"{name} must be above {allowed.low:g}", name)
    _check_range(name, value, allowed.low, allowed.high)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"within [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {expected}, got {value}", name)
