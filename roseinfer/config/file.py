"""Config files: TOML, JSON or, if PyYAML is installed, YAML."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.json_file import parse_json


def load_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a .toml, .json, .yaml or .yml file. Raise `ConfigError` if there is none."""
    loaders: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": parse_json}
    loader = loaders.get(path.suffix) or (_yaml_loader() if path.suffix in (".yaml", ".yml") else None)
    if loader is None:
        raise ConfigError(f"config: {path} is not a .toml, .json or .yaml file")
    try:
        values = loader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"config: {path}: nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"config: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"config: {path} does not map option names to values")
    return values


def _yaml_loader() -> Callable[[str], Any]:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("config: YAML requires the package PyYAML; TOML and JSON do not") from error

    def load(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return load
