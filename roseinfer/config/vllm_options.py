"""Options of vLLM, by name and value, as ours: translated, ignored with a note, or refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roseinfer.config.vllm_adapters import adapters_of
from roseinfer.config.vllm_names import VLLM_OPTIONS, Ignored, IgnoredValue, Refused, RefusedValue, Works
from roseinfer.config.vllm_speculation import speculation_of
from roseinfer.core.errors import ConfigError

PAGE = "docs/from-vllm.md"
# Values that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, "", {}, [], ())
# Options of other shapes than ours: functions from a value, and the option's name in messages, to our value and notes.
_CONVERTERS: Mapping[str, Callable[[Any, str], tuple[Any, list[str]]]] = {
    "speculative_config": speculation_of,
    "lora_modules": adapters_of,
}


@dataclass(slots=True)
class Translation:
    """Options of ours that vLLM's options mean, and a line about each one that is ignored."""

    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, shown: str = "") -> None:
        """Add an option of vLLM. `shown`: its name in messages, as the user wrote it.

        Raise `ConfigError` for an option or a value that is not supported, and KeyError for one that is not vLLM's.
        """
        option, shown = VLLM_OPTIONS[name], shown or name
        if isinstance(option, Works):
            self._add_ours(option, value, shown)
        elif isinstance(option, Ignored):
            if value not in _NOTHING:
                self.notes.append(f"{shown} is ignored: {option.why}")
        elif not asks_for_nothing(option, value):
            named = _with_value(shown, value) if option.harmless else shown
            raise ConfigError(f"{named} is not supported: {option.why}; see {PAGE}")

    def _add_ours(self, option: Works, value: Any, shown: str) -> None:
        converted = _CONVERTERS.get(option.name)
        if converted is not None:
            if value not in _NOTHING:
                self.options[option.ours], notes = converted(value, shown)
                self.notes += notes
            return
        meant = our_value(option.name, value, shown)
        if isinstance(meant, dict):
            meant = json.dumps(meant)  # as on a command line
        if isinstance(meant, IgnoredValue):
            self.notes.append(f"{_with_value(shown, value)} is ignored: {meant.why}")
        elif not option.inverse:
            self.options[option.ours] = meant
        elif isinstance(meant, bool):
            self.options[option.ours] = not meant
        else:
            raise ConfigError(f"{shown}: invalid value {meant!r} (expected true or false)")


def our_value(name: str, value: Any, shown: str) -> Any:
    """Return what a value of an option means here: the same value if vLLM has no other word for it.

    Return a `IgnoredValue` for a value that is ignored. Raise `ConfigError` for one that is not supported; `shown`: the
    option's name in its message.
    """
    option = VLLM_OPTIONS.get(name)
    if not isinstance(option, Works) or isinstance(value, (list, tuple, dict)):
        return value
    meant = option.values.get(str(value), value)
    if isinstance(meant, RefusedValue):
        raise ConfigError(f"{_with_value(shown, value)} is not supported: {meant.why}; see {PAGE}")
    return meant


def asks_for_nothing(option: Refused, value: Any) -> bool:
    """Return True for a value that changes nothing, so that it needs no support."""
    return value in _NOTHING or str(value) in option.harmless


def split_list(text: str) -> list[str]:
    """Return the values of an option that takes several: of a JSON list as vLLM writes it, else the text alone."""
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            return [text]
        return [str(value) for value in found]
    return [text]


def _with_value(shown: str, value: Any) -> str:
    return shown if value is True else f"{shown} {value}".lstrip()
