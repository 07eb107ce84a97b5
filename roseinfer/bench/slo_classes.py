"""Classes of latency objectives for the requests of a load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.json_file import read_json
from roseinfer.core.slo import Slo
from roseinfer.server.request.slo_classes import read_slo_classes

_KEYS = ("name", "share", "ttft", "tpot", "e2e", "body", "headers", "in_min", "in_len", "out_min", "out_len")


@dataclass(frozen=True, slots=True)
class LoadClass:
    """Class of a load's requests, drawn in proportion to `share`. Objectives are in seconds, inf = none.

    `body`, `headers`: fields that tell the server. `prompts`, `outputs`: (min, max) tokens, None = the load's.
    """

    name: str
    share: float = 1.0
    ttft_s: float = inf
    tpot_s: float = inf
    e2e_s: float = inf
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[int, int] | None = None
    outputs: tuple[int, int] | None = None

    @property
    def has_objectives(self) -> bool:
        """True if the class has objectives; otherwise its requests are best effort."""
        return min(self.ttft_s, self.tpot_s, self.e2e_s) < inf


def read_classes(path: str) -> tuple[LoadClass, ...]:
    """Read a JSON list of `{"name", "share", "ttft", "tpot", "e2e", "body", "headers"}` or a server's `classes.toml`.

    JSON gives objectives in seconds; without `body` and `headers` they are sent as `slo`. `in_len` and `out_len` give a
    class its own lengths, uniform from `in_min` and `out_min` if given. A server's classes are equally likely and sent
    by name. Raise `ConfigError`.
    """
    if Path(path).suffix == ".toml":
        return tuple(_served(name, entry.slo) for name, entry in read_slo_classes(path).classes.items())
    try:
        entries = read_json(Path(path))
    except OSError as error:
        raise ConfigError(f"slo_classes: cannot read {path!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"slo_classes: {path!r}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"slo_classes: {path!r} is not a list of classes")
    classes = tuple(_parse(number, entry) for number, entry in enumerate(entries))
    if len({entry.name for entry in classes}) != len(classes):
        raise ConfigError(f"slo_classes: {path!r} names a class twice")
    return classes


def _served(name: str, slo: Slo) -> LoadClass:
    body = {"slo": {"class": name}}
    return LoadClass(name, ttft_s=slo.ttft_s or inf, tpot_s=slo.tpot_s or inf, e2e_s=slo.e2e_s or inf, body=body)


def _parse(number: int, entry: Any) -> LoadClass:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"slo_classes: entry {number} is not an object with a name")
    name = entry["name"]
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"slo_classes: unknown key '{name}.{key}'; choose from {', '.join(_KEYS)}")
    limits = {key: _positive(name, key, entry[key]) for key in ("ttft", "tpot", "e2e") if key in entry}
    share = _positive(name, "share", entry.get("share", 1.0))
    headers = _table(name, "headers", entry)
    body = _table(name, "body", entry)
    if "body" not in entry and not headers and limits:
        body = {"slo": {f"{key}_ms": 1e3 * seconds for key, seconds in limits.items()}}
    seconds_of = {f"{key}_s": seconds for key, seconds in limits.items()}
    prompts, outputs = _lengths(name, "in", entry), _lengths(name, "out", entry)
    return LoadClass(name, share, **seconds_of, body=body, headers=headers, prompts=prompts, outputs=outputs)


def _lengths(name: str, what: str, entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (min, max) tokens, or None."""
    most: Any = entry.get(f"{what}_len")
    fewest: Any = entry.get(f"{what}_min", most)
    if fewest is None:
        return None
    if type(fewest) is not int or type(most) is not int or not 1 <= fewest <= most:
        rule = f"{what}_len must be a positive number of tokens, and {what}_min must not exceed it"
        raise ConfigError(f"slo_classes: {name}: {rule}, got {most!r} and {fewest!r}")
    return fewest, most


def _positive(name: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
        raise ConfigError(f"slo_classes: {name}.{key} must be a positive number, got {value!r}")
    return float(value)


def _table(name: str, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    value = entry.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"slo_classes: {name}.{key} must be an object, got {value!r}")
    return value
