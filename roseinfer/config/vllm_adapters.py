"""vLLM's `--lora-modules` as our option `lora`: NAME=PATH, or a JSON object with `name` and `path`."""

import json
from collections.abc import Mapping
from typing import Any

from roseinfer.core.errors import ConfigError


def adapters_of(modules: Any, shown: str) -> tuple[list[str], list[str]]:
    """Return the texts of our option, and a line about each field that is ignored.

    `shown`: the option's name in messages. Raise `ConfigError` for a module without name or path.
    """
    found: list[str] = []
    notes: list[str] = []
    for module in modules if isinstance(modules, (list, tuple)) else [modules]:
        if isinstance(module, str) and not module.startswith("{"):
            found.append(module)
            continue
        fields = _fields(module, shown)
        name, path = fields.get("name"), fields.get("path")
        if not (isinstance(name, str) and isinstance(path, str)):
            raise ConfigError(f"{shown}: expected NAME=PATH or a JSON object with name and path, got {module!r}")
        found.append(f"{name}={path}")
        notes += [f"{shown}: {field} of {name!r} is ignored" for field in fields if field not in ("name", "path")]
    return found, notes


def _fields(module: Any, shown: str) -> Mapping[str, Any]:
    if isinstance(module, str):
        try:
            module = json.loads(module)
        except ValueError as error:
            raise ConfigError(f"{shown}: invalid JSON {module!r}: {error}") from error
    if not isinstance(module, Mapping):
        raise ConfigError(f"{shown}: expected NAME=PATH or a JSON object with name and path, got {module!r}")
    return module
