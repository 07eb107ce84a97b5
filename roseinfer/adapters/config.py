"""Config of a LoRA adapter, as the library PEFT saves it in adapter_config.json (huggingface/peft, LoraConfig).

Tensors say which layers an adapter changes, so fields that choose layers are ignored. A field that would change the
result is applied or refused by name.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.core.json_file import field_name, read_object, shortened

CONFIG_FILE = "adapter_config.json"
# PEFT's defaults.
DEFAULT_RANK_COUNT = 8
DEFAULT_ALPHA_SHARE = 8.0
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"}
# Fields that only matter in training, or that the tensors' names and shapes replace.
_IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",  # of the base's matrices; A and B are stored alike
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",  # of `use_qalora`
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Other ways to initialise change the base model as well.
_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
# Regular expressions whose matching takes little time: only single characters are repeated, few of them, and there are
# few ways through the alternatives of all groups.
_PATTERN = re.compile(r"\^?(?:\\\.|(?:\\d|\.|\[[\w-]+\])[*+]?|[\w-]|[()|])+\$?", re.ASCII)
_MAX_PATTERN_CHARS = 200
_MAX_REPEAT_COUNT = 2
_MAX_CHOICES_COUNT = 64
MAX_PATTERNS_COUNT = 4096
MAX_REPEATING_COUNT = 64


class _Patterns:
    """Values for modules whose path ends with a pattern; the first that matches counts."""

    def __init__(self, values: Sequence[tuple[re.Pattern[str], float]] = ()) -> None:
        self.values = values
        self._found: dict[str, float | None] = {}

    def of(self, module: str) -> float | None:
        if module not in self._found:
            self._found[module] = next((value for pattern, value in self.values if pattern.match(module)), None)
        return self._found[module]


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Fields that a runner applies. `base`: name of the model that the adapter was trained on, if known."""

    rank: int
    alpha: float
    rslora: bool
    ranks: _Patterns
    alphas: _Patterns
    base: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Read the config of the adapter in `folder`. Raise `ModelNotFoundError` without one, and
        `UnsupportedModelError` naming a field that is invalid or not supported.
        """
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise ModelNotFoundError(f"{folder} holds no {CONFIG_FILE}")
        try:
            return cls.of(read_object(path))
        except _FieldError as error:
            raise UnsupportedModelError(f"{path}: {error}") from None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "PeftConfig":
        if fields.get("peft_type") != "LORA":
            raise _FieldError(f"peft_type is {shortened(fields.get('peft_type'))} (expected 'LORA')")
        _refuse(fields)
        rslora = fields.get("use_rslora", False)
        if not isinstance(rslora, bool):
            raise _FieldError(f"use_rslora is {shortened(rslora)} (expected true or false)")
        base = fields.get("base_model_name_or_path")
        return cls(
            rank=_rank("r", fields.get("r", DEFAULT_RANK_COUNT)),
            alpha=_number("lora_alpha", fields.get("lora_alpha", DEFAULT_ALPHA_SHARE)),
            rslora=rslora,
            ranks=_patterns("rank_pattern", fields.get("rank_pattern"), _rank),
            alphas=_patterns("alpha_pattern", fields.get("alpha_pattern"), _number),
            base=base if isinstance(base, str) and base else None,
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its path without PEFT's prefix."""
        found = self.ranks.of(module)
        return self.rank if found is None else int(found)

    def scale_of(self, module: str) -> float:
        """Return s of W + s B A."""
        found, rank = self.alphas.of(module), self.rank_of(module)
        return (self.alpha if found is None else found) / (math.sqrt(rank) if self.rslora else rank)

    @property
    def max_rank(self) -> int:
        """Largest rank that a module may have."""
        return max(self.rank, *(int(rank) for _, rank in self.ranks.values), 0)


class _FieldError(Exception):
    """Unusable field; the message names it."""


def _refuse(fields: Mapping[str, Any]) -> None:
    init = fields.get("init_lora_weights")
    if not any(init is known or (isinstance(init, str) and init == known) for known in _INITS):
        raise _FieldError(f"init_lora_weights is {shortened(init)}, which changes the base model as well")
    if fields.get("bias", "none") not in ("none", None):
        raise _FieldError(f"bias is {shortened(fields['bias'])}, which is not supported (expected 'none')")
    for name, value in fields.items():
        used = not (value is None or value is False or (isinstance(value, str | list | dict) and not value))
        if used and name not in _READ and name not in _IGNORED:
            raise _FieldError(f"{field_name(name)} is {shortened(value)}, which is not supported")


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _FieldError(f"{name} is {shortened(value)} (expected a positive integer)")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FieldError(f"{name} is {shortened(value)} (expected a number)")
    try:
        return float(value)
    except OverflowError:
        raise _FieldError(f"{name} is {shortened(value)}, which is too large") from None


def _patterns(name: str, given: Any, check: Any) -> _Patterns:
    if given is None:
        return _Patterns()
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS_COUNT:
        raise _FieldError(f"{name} is {shortened(given)} (expected an object with up to {MAX_PATTERNS_COUNT} entries)")
    if sum(_repeats(key) > 0 for key in given) > MAX_REPEATING_COUNT:
        raise _FieldError(f"{name} has more than {MAX_REPEATING_COUNT} patterns with * or +")
    return _Patterns([(_compiled(name, key), check(f"{name}.{key}", value)) for key, value in given.items()])


def _repeats(pattern: str) -> int:
    return pattern.count("*") + pattern.count("+")


def _compiled(name: str, key: str) -> re.Pattern[str]:
    simple = _PATTERN.fullmatch(key) if len(key) <= _MAX_PATTERN_CHARS else None
    if simple is None or _repeats(key) > _MAX_REPEAT_COUNT:
        raise _FieldError(f"{name}: the pattern {shortened(key)} is not supported")
    try:
        compiled = re.compile(rf"(.*\.)?({key})$", re.ASCII)
    except re.error:
        raise _FieldError(f"{name}: the pattern {shortened(key)} is not a regular expression") from None
    if _choices(key) > _MAX_CHOICES_COUNT:
        raise _FieldError(f"{name}: the pattern {shortened(key)} is not supported (too many alternatives)")
    return compiled


def _choices(pattern: str) -> int:
    """Return the product of the numbers of alternatives of all groups. A repeated character counts as four of them."""
    found, inside = 4 ** _repeats(pattern), [1]
    for char in f"({pattern})":
        if char == "(":
            inside.append(1)
        elif char == "|":
            inside[-1] += 1
        elif char == ")":
            found *= inside.pop()
    return found * inside.pop()
