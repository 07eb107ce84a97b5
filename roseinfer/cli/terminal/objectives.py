"""Latency objectives as people type them: `ttft=200ms tpot=30ms`."""

import re
from collections.abc import Mapping
from typing import Any

from roseinfer.core.errors import ConfigError

NAMES = ("ttft", "tpot", "e2e")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")


def parse_objectives(text: str) -> dict[str, Any]:
    """Parse words like `ttft=200ms`, `e2e=2s` and `class=chat` into the `slo` field of a request. The default unit is
    ms.

    `off` alone gives {}. Raises `ConfigError` that names the invalid word.
    """
    if text.strip() == "off":
        return {}
    slo: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name == "class" and value:
            slo["class"] = value
        elif name in NAMES:
            slo[f"{name}_ms"] = _milliseconds(word, value)
        else:
            raise ConfigError(f"slo: unknown objective {word!r} (expected ttft=200ms, tpot=30ms, e2e=5s or class=NAME)")
    return slo


def _milliseconds(word: str, value: str) -> float:
    match = _TIME.fullmatch(value)
    number = float(match[1]) * (1000.0 if match[2] == "s" else 1.0) if match else 0.0
    if not number > 0:
        raise ConfigError(f"slo: invalid time in {word!r} (expected for example 200ms or 2s)")
    return number


def shown_objectives(slo: Mapping[str, Any]) -> str:
    """Format objectives as words that `parse_objectives` reads; empty for none."""
    words = [f"{name}={slo[f'{name}_ms']:g}ms" for name in NAMES if slo.get(f"{name}_ms")]
    return " ".join([*words, *([f"class={slo['class']}"] if slo.get("class") else [])])
