"""Configuration of a server's models: the engines of each, and what they share."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any
from unicodedata import category

from roseinfer.core.config.engine import PRICED, EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError

# Options of a server that one model may have for itself. The others hold for all models.
MODEL_SERVER_OPTIONS = frozenset(
    {
        "served_model_name",
        "chat_template",
        "default_chat_template_kwargs",
        "tool_call_parser",
        "reasoning",
        "length_predictor",
        "max_num_queued_reqs",
    }
)
SHARE = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelConfig:
    """One model of a server.

    `server`: the server's options, with this model's own. `first_engine`: number of its first engine; engines are
    numbered through all models. `tokenizer`: folder of its tokenizer, once it is known.
    """

    engine: EngineConfig
    replicas: ReplicasConfig
    server: ServerConfig
    first_engine: int = 0
    tokenizer: str = ""

    def __post_init__(self) -> None:
        for name in self.names:
            if any(category(character) in ("Cc", "Cs") for character in name):  # answers and metrics contain the name
                raise ConfigError(
                    f"served_model_name: invalid name {name!r} (expected text without control characters)"
                )

    @property
    def model_name(self) -> str:
        """Return the model as the operator has named it."""
        return self.engine.model.model

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names under which it is served. The first one labels its metrics."""
        return self.server.served_model_name or (self.model_name,)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def gpus(self) -> frozenset[int]:
        """Return the GPUs that its engines use if the machine has GPUs."""
        if self.engine.model.device in ("cpu", PRICED):
            return frozenset()
        listed = self.replicas.gpu_lists
        if listed:
            return frozenset(gpu for its in listed for gpu in its)
        return frozenset(range(self.replicas.count * self.engine.model.tensor_parallel_size))


def all_names(models: Iterable[ServedModelConfig]) -> list[str]:
    """Return the names of all models."""
    return [name for model in models for name in model.names]


def arranged(models: Sequence[ServedModelConfig], own_shares: Iterable[int] = ()) -> tuple[ServedModelConfig, ...]:
    """Number the engines of all models, and divide the memory of GPUs that several models use.

    Models whose indices are in `own_shares` keep their `gpu_memory_utilization`. The others on a GPU get equal parts of
    what is left of theirs. Raises `ConfigError` for a name that two models or adapters have, and for options that
    models cannot share. A single model stays unchanged.
    """
    _check_adapters(models)
    if len(models) == 1:
        return tuple(models)
    for model in models:
        _check_alone(model)
    for one, other in combinations(models, 2):
        _check_pair(one, other)
    own = frozenset(own_shares)
    _check_own_shares(models, own)
    shares = _shares(models, own)
    engines = sum(model.replicas.count for model in models)
    return tuple(
        replace(model, engine=_with_others(model, engines, share, alone=_alone(model, models)), first_engine=first)
        for model, share, first in zip(models, shares, _firsts(models), strict=True)
    )


def _firsts(models: Sequence[ServedModelConfig]) -> Iterator[int]:
    first = 0
    for model in models:
        yield first
        first += model.replicas.count


def _with_others(model: ServedModelConfig, engines: int, share: float, *, alone: bool) -> EngineConfig:
    cache = replace(model.engine.cache, gpu_memory_utilization=share)
    return replace(model.engine, cache=cache, other_engines=engines - model.replicas.count, shares_gpu=not alone)


def _alone(model: ServedModelConfig, models: Sequence[ServedModelConfig]) -> bool:
    return not any(model.gpus & other.gpus for other in models if other is not model)


def _check_alone(model: ServedModelConfig) -> None:
    if model.replicas.engine_list:
        raise ConfigError("engines: engines on other hosts cannot be combined with several models")


def _check_adapters(models: Sequence[ServedModelConfig]) -> None:
    """Raise `ConfigError` for an adapter that requests could not name."""
    taken = set(all_names(models))
    for model in models:
        for name in model.engine.adapters.named:
            if name in taken:
                raise ConfigError(f"lora: {name!r} is the name of a model or of another model's adapter")
            taken.add(name)


def _check_pair(one: ServedModelConfig, other: ServedModelConfig) -> None:
    common = next((name for name in one.names if name in other.names), None)
    if common is not None:
        raise ConfigError(f"served_model_name: two models have the name {common!r}; give each a name of its own")
    for name, first, second in _outputs(one, other):
        if first is not None and first == second:
            raise ConfigError(f"{name}: {one.name!r} and {other.name!r} cannot share {first!r}; set it for one model")
    if one.gpus & other.gpus:
        for model in (one, other):
            size = model.engine.model.tensor_parallel_size
            if size > 1:
                raise ConfigError(
                    f"tensor_parallel_size of {model.name!r} is {size}, and its GPUs are also those of "
                    f"{(other if model is one else one).name!r}; give each model devices of its own"
                )


def _outputs(one: ServedModelConfig, other: ServedModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names and values of options that name what an engine writes."""
    for name in ("profile", "record"):
        yield name, getattr(one.engine.profile, name), getattr(other.engine.profile, name)
    name = "kv_events_endpoint"
    yield name, getattr(one.engine.kv_events, name), getattr(other.engine.kv_events, name)


def _shares(models: Sequence[ServedModelConfig], own: frozenset[int]) -> list[float]:
    """Return each model's share of the memory of its GPUs."""
    return [
        model.engine.cache.gpu_memory_utilization
        if index in own or not model.gpus
        else min(_part(gpu, model, models, own) for gpu in model.gpus)
        for index, model in enumerate(models)
    ]


def _check_own_shares(models: Sequence[ServedModelConfig], own: frozenset[int]) -> None:
    for gpu in frozenset().union(*(model.gpus for model in models)):
        taken = sum(models[index].engine.cache.gpu_memory_utilization for index in own if gpu in models[index].gpus)
        if taken > 1:
            raise ConfigError(f"{SHARE}: the models on GPU {gpu} take {taken:g} of its memory, which is more than all")


def _part(gpu: int, model: ServedModelConfig, models: Sequence[ServedModelConfig], own: frozenset[int]) -> float:
    there = [index for index, other in enumerate(models) if gpu in other.gpus]
    taken = sum(models[index].engine.cache.gpu_memory_utilization for index in there if index in own)
    total = model.engine.cache.gpu_memory_utilization
    if taken >= total:
        raise ConfigError(
            f"{SHARE}: no memory of GPU {gpu} is left for {model.name!r}: other models take {taken:g} of {total:g}"
        )
    return (total - taken) / sum(index not in own for index in there)
