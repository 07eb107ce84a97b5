"""Registry of the formats of tool calls, by name and by chat template."""

import pkgutil
from functools import cache
from importlib import import_module

from roseinfer.core.errors import ConfigError
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools import formats
from roseinfer.text.tools.base import ToolFormat


@cache
def _formats() -> dict[str, type[ToolFormat]]:
    modules = [import_module(module.name) for module in pkgutil.iter_modules(formats.__path__, f"{formats.__name__}.")]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {format.name: format for format in sorted(found, key=lambda format: format.name)}


def format_names() -> tuple[str, ...]:
    """Return the values of `--tool-call-parser`."""
    return tuple(_formats())


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format called `name`. Raise `ConfigError` for a name outside `format_names`."""
    if name not in _formats():
        raise ConfigError(f"unknown tool_call_parser {name!r}; known: {', '.join(_formats())}")
    return _formats()[name](tokenizer)


def detect(template: str | None) -> str | None:
    """Return the format in which a chat template makes the model call tools; None if it is unclear."""
    if template is None:
        return None
    written = [name for name, format in _formats().items() if format.written_by(template)]
    return written[0] if len(written) == 1 else None
