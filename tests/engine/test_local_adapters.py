"""Adapters of an engine in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.core.adapters import Adapter
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.local import LocalEngine
from tests.helpers.lora_folders import write_tiny_adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("given", "a", "b")):
        write_tiny_adapter(made / name, seed)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    with LocalEngine(config(AdapterConfig(lora=(f"given={folder}/given",), lora_dir=str(folder)))) as made:
        yield made


def config(adapters: AdapterConfig) -> EngineConfig:
    model = ModelConfig(model="tiny", device="cpu", threads=1)
    return EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=128), adapters=adapters)


def request(adapter: Adapter | None) -> GenerateRequest:
    params = SequenceParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id="r", prompt=Prompt([5, 9, 2, 7], params, RequestMeta(adapter=adapter)))


def ids(engine: LocalEngine, adapter: Adapter | None) -> list[int]:
    return [token for chunks in engine.run([request(adapter)]) for _, chunk in chunks for token in chunk.token_ids]


def test_adapters_come_and_go(engine: LocalEngine) -> None:
    given = engine.adapters()["given"]
    assert engine.info.adapters == (given,)
    put = engine.put_adapter("x", "a")
    outputs = [ids(engine, adapter) for adapter in (None, given, put)]
    assert len(set(map(tuple, outputs))) == 3
    other = engine.put_adapter("x", "b")
    assert ids(engine, other) != outputs[2] and ids(engine, put) == outputs[2]
    assert engine.drop_adapter("x") == other
    assert set(engine.adapters()) == {"given"}
    with pytest.raises(InvalidRequestError, match="no LoRA adapter is named 'x'"):
        engine.drop_adapter("x")


def test_a_folder_that_may_not_be_read_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="not allowed") as raised:
        engine.put_adapter("x", "/etc")
    assert raised.value.code == "adapter_not_loaded"
    assert set(engine.adapters()) == {"given"}


def test_no_adapter_is_loaded_while_another_call_runs(engine: LocalEngine) -> None:
    running = engine.run([request(None)])
    next(running)
    with pytest.raises(InvalidRequestError, match="another call"):
        engine.put_adapter("x", "a")
    running.close()
    engine.put_adapter("x", "a")
    engine.drop_adapter("x")


def test_an_engine_without_adapters_says_how_to_get_them() -> None:
    with LocalEngine(config(AdapterConfig())) as plain:
        assert plain.adapters() == {}
        for call in (lambda: plain.put_adapter("x", "a"), lambda: plain.drop_adapter("x")):
            with pytest.raises(InvalidRequestError, match="start it with --lora or --lora-dir"):
                call()
