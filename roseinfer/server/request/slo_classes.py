"""Named classes of objectives from the operator's file: defaults for requests."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import CUSTOM_CLASS, NO_CLASS, Slo
from roseinfer.server.http.api_keys import digests

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_TARGETS = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "e2e_ms": "e2e_s"}
_ALLOWANCES = ("allow_hints", "allow_priority", "allow_tenant")
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class SloClass:
    """One class. An empty `slo` is best effort. `timeout_s`: from arrival to the end, None = unlimited.

    `allow_...`: requests may set a length hint, a priority other than the class's, and a tenant.
    """

    slo: Slo
    priority: int = 0
    timeout_s: float | None = None
    allow_hints: bool = True
    allow_priority: bool = True
    allow_tenant: bool = True


@dataclass(frozen=True, slots=True)
class SloClasses:
    """All classes. `models`, `keys` (SHA-256 digests in hexadecimal) and `service_tiers` map to class names."""

    classes: dict[str, SloClass] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    service_tiers: dict[str, str] = field(default_factory=dict)

    def check(self, served_names: Iterable[str], key_digests: Iterable[str]) -> None:
        """Raise `ConfigError` for an unknown model or API key."""
        unknown = sorted(self.models.keys() - set(served_names))
        if unknown:
            raise ConfigError(f"slo_classes: models.{unknown[0]}: unknown model")
        strangers = sorted(self.keys.keys() - set(key_digests))
        if strangers:
            raise ConfigError(f"slo_classes: keys.{_shown(strangers[0])}: unknown API key digest")


def configured_classes(config: ServerConfig, served_names: Iterable[str]) -> SloClasses:
    """Return the classes of the file that the option `slo_classes` names, if any. Raises `ConfigError`.

    `served_names`: of all models.
    """
    if config.slo_classes is None:
        return SloClasses()
    classes = read_slo_classes(config.slo_classes)
    classes.check(served_names, digests(config.api_key))
    return classes


def read_slo_classes(path: str) -> SloClasses:
    """Read a file. Raises `ConfigError` that names the file or the invalid key."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"slo_classes: cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or nested too deeply
        raise ConfigError(f"slo_classes: {path} is invalid TOML: {error}") from None
    return parse_slo_classes(data)


def parse_slo_classes(data: Mapping[str, Any]) -> SloClasses:
    """Return the classes of a parsed file. Raises `ConfigError` that names the invalid key."""
    _check_keys("", data, ("classes", "models", "keys", "service_tiers"))
    classes = {name: _class(name, fields) for name, fields in _table(data, "classes").items()}
    if not classes:
        raise _wrong("classes", "defines no class")
    return SloClasses(
        classes=classes,
        models=_names(data, "models", classes),
        keys={_digest(key): name for key, name in _names(data, "keys", classes).items()},
        service_tiers=_names(data, "service_tiers", classes),
    )


def _class(name: str, fields: Any) -> SloClass:
    place = f"classes.{name}"[:100]
    if not _NAME.fullmatch(name):
        raise _wrong(place, "a name is 1 to 64 letters, digits, '_', '-' and '.', with a letter or digit first")
    if name in (NO_CLASS, CUSTOM_CLASS):
        raise _wrong(place, "the name is reserved")
    if not isinstance(fields, dict):
        raise _wrong(place, "must be a table")
    _check_keys(f"{place}.", fields, (*_TARGETS, "priority", "timeout_s", *_ALLOWANCES))
    targets = {s: _positive(f"{place}.{ms}", fields[ms]) / 1000 for ms, s in _TARGETS.items() if ms in fields}
    priority = fields.get("priority", 0)
    if type(priority) is not int or priority not in _INT64:
        raise _wrong(f"{place}.priority", "must be an integer of 64 bits")
    timeout_s = _positive(f"{place}.timeout_s", fields["timeout_s"]) if "timeout_s" in fields else None
    for key in _ALLOWANCES:
        if not isinstance(fields.get(key, True), bool):
            raise _wrong(f"{place}.{key}", "must be true or false")
    allowances = {key: fields[key] for key in _ALLOWANCES if key in fields}
    return SloClass(Slo(**targets, class_name=name), priority, timeout_s, **allowances)


def _positive(place: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(place, f"must be a number, got {str(value)[:40]!r}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not (isfinite(number) and number / 1000 > 0):
        raise _wrong(place, f"must be positive and finite, got {str(value)[:40]}")
    return number


def _names(data: Mapping[str, Any], section: str, classes: Mapping[str, SloClass]) -> dict[str, str]:
    names = _table(data, section)
    for key, name in names.items():
        place = f"{section}.{_shown(key) if section == 'keys' else key[:100]}"
        if not isinstance(name, str) or name not in classes:
            raise _wrong(place, f"unknown class: {str(name)[:40]!r}")
    return names


def _table(data: Mapping[str, Any], section: str) -> dict[str, Any]:
    table = data.get(section, {})
    if not isinstance(table, dict):
        raise _wrong(section, "must be a table")
    return table


def _digest(key: str) -> str:
    found = _DIGEST.fullmatch(key)
    if found is None:
        why = "write the key's digest, 'sha256:' and 64 hexadecimal digits (printf %s \"$KEY\" | sha256sum)"
        raise _wrong(f"keys.{_shown(key)}", why)
    return found[1].lower()


def _shown(key: str) -> str:
    """Return a safe name for an entry under `keys`, which may be the key itself by mistake."""
    digest = key.removeprefix("sha256:")
    return f"sha256:{digest[:8]}..." if re.fullmatch(r"[0-9a-fA-F]{64}", digest) else "(entry)"


def _check_keys(prefix: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            raise _wrong(f"{prefix}{key}"[:100], f"is unknown; the keys are {', '.join(known)}")


def _wrong(place: str, why: str) -> ConfigError:
    return ConfigError(f"slo_classes: {place}: {why}")
