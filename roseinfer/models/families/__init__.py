"""Families of models. Each file describes one: how its config is read, and the names of its tensors; without torch.

A package outside adds families by `register`, or by an entry point of the group `roseinfer.families` that names a
`ModelFamily`.
"""

import difflib
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from roseinfer.core.errors import ConfigError
from roseinfer.core.support import SUPPORT_PAGE
from roseinfer.models.families.family import ModelFamily

_MODULES = (
    "llama",
    "mistral",
    "qwen",
    "qwen3_5",
    "mixtral",
    "phi3",
    "smollm3",
    "granite",
    "olmo",
    "seed_oss",
    "exaone4",
    "glm4",
    "cohere2",
    "ernie",
    "hunyuan",
    "ministral",
    "ministral3",
    "mistral3",
    "gemma3",
    "starcoder2",
    "gpt2",
    "gpt_oss",
)
ENTRY_POINTS = "roseinfer.families"
# Most names end alike, so any two are similar.
MIN_SIMILARITY_SHARE = 0.85

_known: dict[str, ModelFamily] = {}


def register(family: ModelFamily) -> None:
    """Add a family. Its architectures replace those of the same name."""
    _known.update(dict.fromkeys(family.architectures, family))


def family_of(architecture: str) -> ModelFamily | None:
    """Return the family of an architecture in config.json; None if it is unknown.

    Raise `ConfigError` naming an entry point of another package that does not lead to a family.
    """
    if architecture not in _known:
        for entry in entry_points(group=ENTRY_POINTS):
            register(_load(entry))
    return _known.get(architecture)


def known_prefixes() -> set[str]:
    """Return the beginnings of tensors' names in all known families."""
    return {prefix for family in _known.values() for prefix in family.prefixes if prefix}


def _load(entry: EntryPoint) -> ModelFamily:
    try:
        family = entry.load()
    except Exception as error:
        raise ConfigError(f"family {entry.name} ({entry.value}) cannot be loaded: {error}") from error
    if not isinstance(family, ModelFamily):
        raise ConfigError(f"family {entry.name} ({entry.value}) is a {type(family).__name__}, not a ModelFamily")
    return family


def known_models_hint(architecture: str) -> str:
    """Return the end of a message about an unknown architecture: similar ones, and the page with all models."""
    similar = ", ".join(difflib.get_close_matches(architecture, _known, cutoff=MIN_SIMILARITY_SHARE))
    page = f"see {SUPPORT_PAGE} for all models"
    return f"similar: {similar}; {page}" if similar else page


for _module in _MODULES:
    for _family in import_module(f"{__name__}.{_module}").FAMILIES:
        register(_family)
