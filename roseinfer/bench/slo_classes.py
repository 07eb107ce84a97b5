"""Classes of latency objectives that a load's requests are drawn from."""

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
    """`share`: how many requests it gets, relative to the others. The objectives in seconds, inf = none.

    `body`, `headers`: what its requests carry to tell the server. `prompts`, `outputs`: the fewest and most tokens of
    its own requests, None = those of the load.
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
    def promises(self) -> bool:
        """Whether it has objectives; without, its requests are best effort."""
        return min(self.ttft_s, self.tpot_s, self.e2e_s) < inf


def read_classes(path: str) -> tuple[LoadClass, ...]:
    """From a JSON list of `{"name", "share", "ttft", "tpot", "e2e", "body", "headers"}` or a server's `classes.toml`.

    JSON gives the objectives in seconds; without `body` and `headers` they are sent as `slo`. `in_len` and `out_len`
    give a class lengths of its own, uniform from `in_min` and `out_min` on if these are there. The classes of a server
    are equally likely, and sent by their names. Raises `ConfigError`.
    """
    if Path(path).suffix == ".toml":
        return tuple(_served(name, entry.slo) for name, entry in read_slo_classes(path).classes.items())
    try:
        entries = read_json(Path(path))
    except OSError as error:
        raise ConfigError(f"slo_classes: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"slo_classes: {path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"slo_classes: {path} holds no list of classes")
    classes = tuple(_parse(number, entry) for number, entry in enumerate(entries))
    if len({entry.name for entry in classes}) != len(classes):
        raise ConfigError(f"slo_classes: {path} names a class twice")
    return classes


def _served(name: str, slo: Slo) -> LoadClass:
    body = {"slo": {"class": name}}
    return LoadClass(name, ttft_s=slo.ttft_s or inf, tpot_s=slo.tpot_s or inf, e2e_s=slo.e2e_s or inf, body=body)


def _parse(number: int, entry: Any) -> LoadClass:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"slo_classes: entry {number} is no class with a name")
    name = entry["name"]
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"slo_classes: {name}.{key} is unknown; there are {', '.join(_KEYS)}")
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
    """(fewest, most)"""
    most: Any = entry.get(f"{what}_len")
    least: Any = entry.get(f"{what}_min", most)
    if least is None:
        return None
    if type(least) is not int or type(most) is not int or not 1 <= least <= most:
        told = f"{what}_len must be a positive number of tokens, and {what}_min one that does not exceed it"
        raise ConfigError(f"slo_classes: {name}: {told}, got {most!r} and {least!r}")
    return least, most


def _positive(name: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
        raise ConfigError(f"slo_classes: {name}.{key} must be a positive number, got {value!r}")
    return float(value)


def _table(name: str, key: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    value = entry.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"slo_classes: {name}.{key} must be an object, got {value!r}")
    return value
