"""Sampling fields of a conversation: the values that apply, and as people type them: `temperature=0.5 top_p=0.9`."""

from collections.abc import Mapping
from typing import Any

from roseinfer.cli.terminal.refusals import advice
from roseinfer.cli.terminal.remote import RefusedError, Remote, RemoteError
from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.core.generation_config import conversation_sampling
from roseinfer.core.sampling import SequenceParams

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "max_tokens", "seed")
NAMES = (*_REALS, *_INTEGERS)


def model_of(remote: Remote, name: str | None) -> tuple[str, dict[str, Any]]:
    """Return the model to ask for and the sampling fields of a conversation.

    The model is `name`, else the first that generates text. There are no fields for a server that does not say what its
    model's defaults are. Raises `ConfigError` if it serves no model, and `RemoteError`.
    """
    try:
        cards = remote.models()
    except RemoteError as error:
        if name is None:
            hints = advice(error, once=True) if isinstance(error, RefusedError) else ()
            raise RemoteError("; ".join([str(error), *hints])) from error
        cards = {}
    if name is None:
        if not cards:
            raise ConfigError(f"{remote.url} serves no model: give its name with model_name")
        generating = (name for name, card in cards.items() if card.get("task", "generate") == "generate")
        name = next(generating, next(iter(cards)))
    defaults = cards.get(name, {}).get("default_sampling")
    if not isinstance(defaults, dict):
        return name, {}
    return name, conversation_sampling({key: value for key, value in defaults.items() if key in NAMES})


def parse_params(text: str) -> dict[str, Any]:
    """Parse words like `temperature=0.5` into fields of a request. Raises `ConfigError` that names the invalid word."""
    params: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name not in NAMES:
            raise ConfigError(f"unknown parameter {word!r} (expected for example temperature=0.5; {', '.join(NAMES)})")
        try:
            params[name] = int(value) if name in _INTEGERS else float(value)
            SequenceParams(**{name: params[name]})
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:
            raise ConfigError(f"invalid number in {word!r}") from error
    return params


def shown_params(params: Mapping[str, Any]) -> str:
    """Format fields as words that `parse_params` reads; empty for none."""
    return " ".join(f"{name}={value}" for name, value in params.items())
