"""Sampling defaults in documents of generation_config.json's format, and where an engine takes them from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from roseinfer.core.json_file import field_name, parse_json, read_object
from roseinfer.core.sampling import SequenceParams

DOCUMENT = "generation_config.json"
AUTO = "auto"  # the model's document
NONE = ("none", "vllm")  # no document; vLLM's name for it is accepted too
# What `chat`, `complete` and the console ask for where the model sets nothing. OpenAI's defaults, the whole
# distribution at temperature 1, make small models write nonsense.
CONVERSATION_DEFAULTS: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}
_SHAPE = frozenset({"temperature", "top_k", "top_p", "min_p"})
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling fields that a document sets. Raise `InvalidRequestError` for one that no request could use.

    `do_sample` is the caller's business.
    """
    values = {name: document[name] for name in _FIELDS if document.get(name) is not None}
    params = SequenceParams(**values)
    return {name: getattr(params, name) for name in values}


def given_document(choice: str) -> dict[str, Any] | None:
    """Return the document that the option `generation_config` names: a file, or the one in a folder.

    None if it names no document. Raise `ConfigError` for a missing or invalid one.
    """
    if choice == AUTO or choice in NONE:
        return None
    path = Path(choice) / DOCUMENT if Path(choice).is_dir() else Path(choice)
    if not path.is_file():
        raise ConfigError(f"generation_config: no file {str(path)!r} (expected auto, none, or a path)")
    try:
        document = read_object(path)
        sampling_defaults(document)
    except (UnsupportedModelError, InvalidRequestError) as error:
        named = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(f"generation_config: {named}") from error
    return document


def given_override(text: str | None) -> dict[str, Any]:
    """Return the sampling fields of the option `override_generation_config`. None removes a field of the document.

    Raise `ConfigError` for anything but a JSON object of sampling fields.
    """
    if text is None:
        return {}
    try:
        fields = parse_json(text)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
        unknown = next((name for name in fields if name not in _FIELDS), None)
        if unknown is not None:
            raise ValueError(f"{field_name(unknown)} is not supported (expected {', '.join(_FIELDS)})")
        return dict.fromkeys(fields) | sampling_defaults(fields)
    except (ValueError, InvalidRequestError) as error:
        raise ConfigError(f"override_generation_config: {error}") from error


def conversation_sampling(model: Mapping[str, float]) -> dict[str, float]:
    """Return the sampling fields of a conversation whose user names none, given the model's defaults.

    A model's temperature and filters belong together: ours are added only if it has none of them.
    """
    return {**({} if model.keys() & _SHAPE else CONVERSATION_DEFAULTS), **model}
