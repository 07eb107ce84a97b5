"""Option of speculation: which proposers guess tokens, and their values.

The option is one text, such as `suffix,tokens=6,chance=0.2`: a method, after a colon a path if the method has one, and
values. Each method is a dataclass whose fields are its values.
"""

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError

DEFAULT_SPECULATION = "off"  # until loads with objectives on GPUs are as good with drafts
# Most drafts of a row. Each is computed, and few texts can be foreseen that far.
MAX_DRAFTS = 8
# Most drafts of a step. Each needs logits over the vocabulary, and many requests leave no time for drafts anyway.
MAX_STEP_DRAFTS = 256
# Matches are measured up to this length: longer ones are no better.
MAX_MATCH_TOKENS = 16
# Tokens of finished outputs that are kept to guess from, of all cache salts together.
DEFAULT_CORPUS_TOKENS = 262_144
MAX_CORPUS_TOKENS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodValues:
    """Values that every method has. `tokens`: maximum drafts of a request in a step."""

    tokens: int = MAX_DRAFTS

    def __post_init__(self) -> None:
        _check("tokens", self.tokens, 1, MAX_DRAFTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramValues(MethodValues):
    """Guess what followed the last tokens earlier in the same request. `min`, `max`: tokens that must be equal, and up
    to which a longer match is better.
    """

    min: int = 2
    max: int = MAX_MATCH_TOKENS

    def __post_init__(self) -> None:
        MethodValues.__post_init__(self)
        _check("min", self.min, 2, MAX_MATCH_TOKENS)
        _check("max", self.max, self.min, MAX_MATCH_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixValues(MethodValues):
    """Guess what usually followed the last tokens, in the same request and in finished outputs.

    `factor`: guesses for each token of the match. `chance`: least probability of a guess, those before it included.
    `corpus`: tokens of finished outputs that are kept, of all cache salts together; 0 = none.
    """

    factor: float = 4.0
    chance: float = 0.1
    corpus: int = DEFAULT_CORPUS_TOKENS

    def __post_init__(self) -> None:
        MethodValues.__post_init__(self)
        _check("factor", self.factor, 0.1, 100.0)
        _check("chance", self.chance, 0.0, 1.0)
        _check("corpus", self.corpus, 0, MAX_CORPUS_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoValues(SuffixValues):
    """Guess as `suffix` does at present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadValues(MethodValues):
    """Guesses of a draft head, which the runner makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpValues(HeadValues):
    """Guesses of the multi-token prediction head in the model's own checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleValues(HeadValues):
    """Guesses of an EAGLE-3 head. `path`: its folder. `aux`: meaning of its layer ids."""

    path: str
    aux: str = "auto"

    def __post_init__(self) -> None:
        MethodValues.__post_init__(self)
        if self.aux not in ("auto", "inputs", "outputs"):
            raise ConfigError(f"aux must be auto, inputs or outputs, got {self.aux!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordValues(MethodValues):
    """For benchmarks: guess nothing, and write all outputs to a file for `recorded`."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedValues(MethodValues):
    """For benchmarks: guess recorded outputs. `wrong`: share of the guesses that are replaced by a wrong token, drawn
    with `seed`.
    """

    path: str
    wrong: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        MethodValues.__post_init__(self)
        _check("wrong", self.wrong, 0.0, 1.0)


_METHODS: dict[str, type[MethodValues]] = {
    "auto": AutoValues,
    "ngram": NgramValues,
    "suffix": SuffixValues,
    "mtp": MtpValues,
    "eagle3": EagleValues,
    "record": RecordValues,
    "recorded": RecordedValues,
}
_SHOWN = "off, auto, ngram, suffix, mtp or eagle3:PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculation: the method that guesses tokens, and its values."""

    speculation: str = option(
        DEFAULT_SPECULATION,
        "guess next tokens and verify several per step: ngram = from the request's own tokens, suffix = from finished "
        "outputs too, auto = at present the same as suffix, mtp = by the model's own draft head, eagle3 = by the draft "
        "head in folder PATH; values follow, such as suffix,tokens=4",
        metavar="off|auto|ngram|suffix|mtp|eagle3:PATH",
    )

    def __post_init__(self) -> None:
        _ = self.values

    @property
    def values(self) -> MethodValues | None:
        """Return the values of the method; None = off."""
        return _read(self.speculation)

    @property
    def recorded(self) -> bool:
        """True if outputs are recorded, or drafts are recorded outputs: for benchmarks with random weights."""
        return isinstance(self.values, RecordValues | RecordedValues)

    @property
    def chosen(self) -> bool:
        """True if speculation is asked for, and is not just the default. An engine without it must not start then."""
        return self.speculation not in ("off", DEFAULT_SPECULATION)


def _read(text: str) -> MethodValues | None:
    """Return the values of a method. Raise `ConfigError` for an unknown one and for invalid values."""
    head, *rest = text.split(",")
    name, colon, path = head.partition(":")
    if text == "off":
        return None
    kind = _METHODS.get(name)
    if kind is None:
        raise ConfigError(f"speculation: unknown method {name!r} (expected {_SHOWN})")
    known = {f.name: f for f in fields(kind)}
    if ("path" in known) != bool(path) or bool(colon) != bool(path):
        raise ConfigError(f"speculation: {name} {'needs a' if 'path' in known else 'has no'} path, got {text!r}")
    given: dict[str, Any] = {"path": path} if colon else {}
    for part in rest:
        key, _, value = part.partition("=")
        if key not in known or key == "path":
            expected = ", ".join(key for key in known if key != "path")
            raise ConfigError(f"speculation: {name} has no value {part!r} (expected {expected})")
        given[key] = _parsed(key, value, known[key].type)
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"speculation: {error}") from error


def _parsed(key: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        word = "an integer" if kind is int else "a number"
        raise ConfigError(f"speculation: {key} must be {word}, got {value!r}") from error


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {value:g}")
