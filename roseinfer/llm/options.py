"""Arguments of `LLM(...)`: our options, and those of vLLM's constructor under our names."""

import os
from collections.abc import Mapping
from typing import Any

from roseinfer.config.vllm_names import VLLM_OPTIONS, Works
from roseinfer.config.vllm_options import PAGE, Translation
from roseinfer.core.errors import ConfigError
from roseinfer.engine.options import engine_option_names

# Options that the server has or ignores, but that change what an `LLM` does -> why they are refused, harmless values.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "data_parallel_size": ("an LLM is one engine; `roseinfer serve --replicas` starts several", (1,)),
    "reasoning_parser": ("structured outputs of an LLM apply from the first token on", ("",)),
}


def engine_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the engine, and a line about each argument that has no effect.

    None means that an argument is not given. Paths and data types of PyTorch may be given as objects. Raise
    `ConfigError` for an argument that is not supported or given under two names; unknown ones are returned.
    """
    known = engine_option_names()
    options: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        if value is None:
            continue
        found = _translate(name, _plain(name, value), known, notes)
        twice = next((ours for ours in found if ours in options), None)
        if twice is not None:
            raise ConfigError(f"{name} and {twice} are the same option; give one of them")
        options |= {ours: meant for ours, meant in found.items() if meant is not None}
    if options.get("enable_lora"):
        options.setdefault("lora_dir", os.sep)  # a caller in this process may read any folder anyway
    return options, notes


def _translate(name: str, value: Any, known: frozenset[str], notes: list[str]) -> dict[str, Any]:
    if name in _REFUSED:
        why, harmless = _REFUSED[name]
        if value in (False, *harmless):
            return {}
        raise ConfigError(f"{name} is not supported: {why}; see {PAGE}")
    option = VLLM_OPTIONS.get(name)
    if option is None:
        return {name: value}
    if isinstance(option, Works) and option.ours not in known:
        notes.append(f"{name} is ignored: it is an option of the server")
        return {}
    translation = Translation()
    translation.add(name, value)
    notes += translation.notes
    return translation.options


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "dtype" and not isinstance(value, str):
        return str(value).removeprefix("torch.")  # torch.float16
    return value
