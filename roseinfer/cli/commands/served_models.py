"""Configurations of the models of `roseinfer serve`: one model, or several."""

from collections.abc import Mapping, Sequence
from typing import Any

from roseinfer.cli.commands.groups import engine_config
from roseinfer.config.options import OptionSet, OwnOptions
from roseinfer.core.config.models import MODEL_SERVER_OPTIONS, SHARE, ServedModelConfig, arranged
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError

# Key of config files: [models.NAME] has the options of one model.
TABLES = "models"


def served_models(options: OptionSet, given: Mapping[str, Any]) -> tuple[ServedModelConfig, ...]:
    """Return the model that `given` describes, or one for each entry of `given["models"]`.

    An option of an entry replaces the shared one. Raises `ConfigError`, which names the table if there is one, for
    options that an entry cannot have, and what `arranged` raises.
    """
    shared = {name: value for name, value in given.items() if name != TABLES}
    entries: Sequence[OwnOptions] = given.get(TABLES, ())
    if not entries:
        return arranged([_model(options, shared)])
    own = _named(entries, shared)
    if entries[0].name is None:
        models = [_model(options, {**shared, **each}) for _, each in own]
    else:
        models = [_of_table(options, shared, name, each) for name, each in own]
    return arranged(models, [index for index, (_, each) in enumerate(own) if SHARE in each])


def _named(entries: Sequence[OwnOptions], shared: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each model's own options, its names among them. A table's name is the model's, unless it has others."""
    names = shared.get("served_model_name", ())
    if entries[0].name is None:
        if names and len(names) != len(entries):
            raise ConfigError(
                f"served_model_name must have one name per model, got {len(names)} names for {len(entries)} models"
            )
        chosen = names or [entry.options["model"] for entry in entries]
        pairs = zip(chosen, entries, strict=True)
        return [(name, {**entry.options, "served_model_name": (name,)}) for name, entry in pairs]
    for name in ("served_model_name", "model"):
        if name in shared:
            raise ConfigError(f"{name} cannot be combined with {TABLES}; set it in the table of a model")
    return [
        (str(entry.name), {"model": entry.name, "served_model_name": (entry.name,), **entry.options})
        for entry in entries
    ]


def _of_table(options: OptionSet, shared: Mapping[str, Any], name: str, own: Mapping[str, Any]) -> ServedModelConfig:
    of_server = {option.name for group in options.groups if group.kind is ServerConfig for option in group.options()}
    foreign = next((key for key in own if key in of_server - MODEL_SERVER_OPTIONS), None)
    if foreign is not None:
        raise ConfigError(f"{foreign} is an option of the whole server: set it outside of {TABLES}.{name}")
    try:
        return _model(options, {**shared, **own})
    except ConfigError as error:
        raise ConfigError(f"{TABLES}.{name}: {error}") from error


def _model(options: OptionSet, given: Mapping[str, Any]) -> ServedModelConfig:
    return ServedModelConfig(
        engine=engine_config(options, given),
        replicas=options.build(ReplicasConfig, given),
        server=options.build(ServerConfig, given),
    )
