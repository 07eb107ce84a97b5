"""Shared things of a server's models: names, numbers of engines, the memory of GPUs."""

from dataclasses import replace
from typing import Any

import pytest

from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import EngineConfig, ModelConfig, ProfileConfig
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.config.models import ServedModelConfig, arranged
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError


def model(
    name: str, share: float = 0.9, *, replicas: ReplicasConfig | None = None, **options: Any
) -> ServedModelConfig:
    engine = EngineConfig(model=ModelConfig(model=name, **options))
    engine = replace(engine, cache=replace(engine.cache, gpu_memory_utilization=share))
    return ServedModelConfig(engine=engine, replicas=replicas or ReplicasConfig(), server=ServerConfig())


def on(devices: str) -> ReplicasConfig:
    return ReplicasConfig(devices=devices)


def shares(*models: ServedModelConfig, own: tuple[int, ...] = ()) -> list[float]:
    return [round(each.engine.cache.gpu_memory_utilization, 3) for each in arranged(models, own)]


def test_a_single_model_stays_as_it_is() -> None:
    only = model("a")
    assert arranged([only]) == (only,)


def with_adapter(name: str, adapter: str) -> ServedModelConfig:
    found = model(name)
    return replace(found, engine=replace(found.engine, adapters=AdapterConfig(lora=(f"{adapter}=/folder",))))


def test_adapters_have_names_of_their_own() -> None:
    arranged([with_adapter("a", "x"), with_adapter("b", "y")])
    for models in ([with_adapter("a", "a")], [model("a"), with_adapter("b", "a")]):
        with pytest.raises(ConfigError, match="lora: 'a' is the name of a model"):
            arranged(models)
    with pytest.raises(ConfigError, match="or of another model's adapter"):
        arranged([with_adapter("a", "x"), with_adapter("b", "x")])


def test_engines_are_numbered_through_all_models() -> None:
    found = arranged([model("a", replicas=ReplicasConfig(replicas=2)), model("b"), model("c", device="cpu")])
    assert [each.first_engine for each in found] == [0, 2, 3]
    assert [each.engine.other_engines for each in found] == [2, 3, 3]
    assert [each.engine.for_engine(0, each.replicas.count).engines for each in found] == [4, 4, 4]


def test_models_on_one_gpu_get_equal_parts_of_its_memory() -> None:
    assert shares(model("a"), model("b"), model("c")) == [0.3, 0.3, 0.3]
    assert [each.engine.shares_gpu for each in arranged([model("a"), model("b")])] == [True, True]


def test_a_share_of_its_own_is_kept_and_the_others_divide_the_rest() -> None:
    assert shares(model("a"), model("b", 0.1), model("c"), own=(1,)) == [0.4, 0.1, 0.4]
    assert shares(model("a", 0.5), model("b", 0.5), own=(0, 1)) == [0.5, 0.5]


def test_models_with_gpus_of_their_own_share_nothing() -> None:
    apart = model("a", replicas=on("0")), model("b", replicas=on("1"))
    assert shares(*apart) == [0.9, 0.9]
    assert [each.engine.shares_gpu for each in arranged(apart)] == [False, False]
    assert shares(model("a", replicas=on("0,1")), model("b", replicas=on("1"))) == [0.45, 0.45]
    assert shares(model("a"), model("b", device="cpu")) == [0.9, 0.9]


@pytest.mark.parametrize(
    ("models", "own", "message"),
    [
        ([model("a"), model("a")], (), "served_model_name: two models have the name 'a'"),
        ([model("a"), model("b", 0.9)], (1,), "no memory of GPU 0 is left for 'a'"),
        ([model("a", 0.6), model("b", 0.6)], (0, 1), "the models on GPU 0 take 1.2 of its memory"),
        ([model("a", tensor_parallel_size=2), model("b")], (), "tensor_parallel_size of 'a' is 2"),
        ([model("a"), model("b", replicas=ReplicasConfig(engines="h:1", tls_dir="t"))], (), "engines on other hosts"),
    ],
)
def test_what_models_cannot_share_is_rejected(models: list[ServedModelConfig], own: tuple[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        arranged(models, own)


def test_tensor_parallelism_needs_gpus_of_its_own() -> None:
    apart = model("a", tensor_parallel_size=2, replicas=on("0+1")), model("b", replicas=on("2"))
    assert shares(*apart) == [0.9, 0.9]


@pytest.mark.parametrize(
    "options",
    [
        {"profile": ProfileConfig(record="file")},
        {"profile": ProfileConfig(profile="folder")},
        {"kv_events": KvEventsConfig(kv_events_endpoint="tcp://127.0.0.1:5557")},
    ],
)
def test_models_cannot_write_to_the_same_place(options: dict[str, Any]) -> None:
    one, other = (replace(each, engine=replace(each.engine, **options)) for each in (model("a"), model("b")))
    with pytest.raises(ConfigError, match="'a' and 'b' cannot share"):
        arranged([one, other])
    assert len(arranged([one, model("b")])) == 2
