"""Adapters in host memory and in slots, and what is refused before any slot changes."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.adapters.memory import AdapterMemory
from roseinfer.core.adapters import AdapterRead
from roseinfer.core.errors import ConfigError
from tests.adapters.driving import Driver, assert_close, build
from tests.adapters.test_equivalence import prompt
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.encoders import ENCODERS, make_encoder
from tests.helpers.lora_folders import PREFIX, linear_shapes, write_adapter

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_reference(make_reference("llama3"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    write_adapter(tmp_path / "a", linear_shapes(model))
    return tmp_path / "a"


def read(driver: Driver, name: str, path: Path) -> AdapterRead:
    """Read a folder in the background and return the result."""
    files = driver.built.adapters
    assert files is not None
    files.read(name, str(path))
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        for result in files.take_read():
            return result
        time.sleep(0.001)
    raise AssertionError("nothing was read")


def test_facts_and_sizes(model: Path, folder: Path) -> None:
    built = build(model, f"a={folder}", lora_slots=3, lora_max_rank=5)
    pool = built.facts.adapters
    assert pool is not None and (pool.num_slots, pool.max_rank) == (3, 5) and pool.load_bytes_per_s > 0
    elements = sum(outs + ins for outs, ins in linear_shapes(model).values())
    assert pool.slot_bytes == 8 * elements * 4, "ranks are rounded up for kernels"
    (result,) = built.adapters.take_read()
    assert (result.name, result.adapter.path, result.adapter.rank) == ("a", str(folder), 4)
    assert result.adapter.num_bytes == 8 * elements * 4
    assert build(model).facts.adapters is None and build(model).adapters is None


def test_the_default_of_the_largest_rank(model: Path, folder: Path, tmp_path: Path) -> None:
    def max_rank(*named: str, **options: object) -> int:
        pool = build(model, *named, **options).facts.adapters
        assert pool is not None
        return pool.max_rank

    assert max_rank(f"a={folder}") == 4
    write_adapter(tmp_path / "b", linear_shapes(model), rank=3, ranks={"q_proj": 11})
    assert max_rank(f"a={folder}", f"b={tmp_path / 'b'}") == 11
    assert max_rank(f"a={folder}", lora_dir=str(tmp_path)) == max_rank(lora_slots=1) == 64


def test_the_default_cache_leaves_room_for_slots(model: Path, monkeypatch) -> None:
    monkeypatch.setattr("roseinfer.runner.cache_size.available_memory_bytes", lambda: 1 << 21)
    found = {}
    for slots in (None, 8):
        options = {} if slots is None else {"lora_slots": slots, "lora_max_rank": 16}
        built = build(model, cache={"block_size": 8, "num_kv_blocks": None}, **options)
        found[slots] = built.facts.num_blocks * built.facts.block_bytes
        taken = 0 if built.facts.adapters is None else slots * built.facts.adapters.slot_bytes
    assert 0 <= found[None] - found[8] - taken // 4 <= 2 * built.facts.block_bytes


def test_loading_replaces_a_slot(model: Path, folder: Path, tmp_path: Path) -> None:
    shapes = linear_shapes(model)
    write_adapter(tmp_path / "b", shapes, rank=9, seed=5)
    some = {name: shape for name, shape in shapes.items() if "q_proj" in name}
    write_adapter(tmp_path / "c", some, rank=2, seed=6)
    named = [f"{name}={tmp_path / name}" for name in "abc"]
    driver = Driver(build(model, *named))
    tokens = prompt(11, 0)
    wanted = {name: driver.run([(tokens, name)])[0] for name in "abc"}
    assert len({output.prompt for output in wanted.values()}) == 3
    for name in ("b", "c", "a", "c"):
        driver.load(1, driver.named[name].digest)
        assert driver.run([(tokens, "b")])[0] == wanted[name]


def test_reading_in_the_background(model: Path, folder: Path, tmp_path: Path) -> None:
    driver = Driver(build(model, f"a={folder}", lora_dir=str(tmp_path)))
    write_adapter(tmp_path / "b", linear_shapes(model), rank=16, seed=1)
    result = read(driver, "b", tmp_path / "b")
    assert result.error is None and result.adapter is not None and result.seconds > 0
    assert (result.adapter.name, result.adapter.rank) == ("b", 16)
    driver.load(1, result.adapter.digest)
    driver.slots["b"] = 1
    alone = Driver(build(model, f"b={tmp_path / 'b'}"))
    assert_close(driver.run([(prompt(9, 3), "b")])[0], alone.run([(prompt(9, 3), "b")])[0])


def test_forgotten_adapters_are_freed_without_further_plans(model: Path, folder: Path) -> None:
    driver = Driver(build(model, f"a={folder}"))
    memory, digest = driver.built.adapters, driver.named["a"].digest
    assert isinstance(memory, AdapterMemory)
    memory.forget(digest)
    with pytest.raises(KeyError):
        driver.load(0, digest)
    assert read(driver, "again", folder).adapter is not None
    driver.load(0, digest)


def change(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {PREFIX + name: tensor}, path)


Q = "model.layers.1.self_attn.q_proj"
REFUSED = {
    "rank": (
        lambda folder, shapes: write_adapter(folder, shapes, rank=65),
        r"a rank is 65, more than lora_max_rank \(64\)",
    ),
    "NaN": (
        lambda folder, shapes: change(folder, f"{Q}.lora_A.weight", torch.full((4, 32), math.nan)),
        rf"tensor {Q}\.lora_A\.weight holds NaN",
    ),
    "inputs": (
        lambda folder, shapes: write_adapter(folder, {**shapes, Q: (32, 48)}),
        rf"tensor {Q}\.lora_A\.weight is \[4, 48\], but the layer has 32 inputs",
    ),
    "outputs": (
        lambda folder, shapes: write_adapter(folder, {**shapes, Q: (64, 32)}),
        rf"tensor {Q}\.lora_B\.weight is \[64, 4\], but the layer has 32 outputs",
    ),
    "another layer": (
        lambda folder, shapes: write_adapter(folder, {**shapes, "model.layers.2.self_attn.q_proj": (32, 32)}),
        r"called model\.layers\.2\.self_attn\.q_proj$",
    ),
    "head": (
        lambda folder, shapes: write_adapter(folder, {**shapes, "lm_head": (99, 32)}),
        "no linear layer that adapters may change called lm_head$",
    ),
    "many": (
        lambda folder, shapes: write_adapter(folder, {f"model.visual.{n}.fc": (3, 3) for n in range(8)}),
        r"called model\.visual\.0\.fc, .*model\.visual\.4\.fc and 3 more$",
    ),
    "twice": (
        lambda folder, shapes: write_adapter(folder, {**shapes, Q.removeprefix("model."): (32, 32)}),
        "changes the same layer as another tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_adapter_changes_no_slot(model: Path, folder: Path, tmp_path: Path, case: str) -> None:
    shapes = linear_shapes(model)
    driver = Driver(build(model, f"a={folder}", lora_dir=str(tmp_path)))
    before = driver.run([(prompt(7, 0), "a")])
    write_adapter(tmp_path / "bad", shapes, seed=9)
    make, message = REFUSED[case]
    make(tmp_path / "bad", shapes)
    result = read(driver, "bad", tmp_path / "bad")
    assert result.adapter is None and result.error is not None
    with pytest.raises(ConfigError, match=message) as caught:
        build(model, f"bad={tmp_path / 'bad'}", lora_max_rank=64)
    assert str(caught.value) == f"lora 'bad': {result.error}"
    assert driver.run([(prompt(7, 0), "a")]) == before


def test_numbers_beyond_the_models_dtype_are_refused(model: Path, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 1e7}))
    with pytest.raises(ConfigError, match="numbers beyond float16"):
        build(model, f"a={folder}", model={"dtype": "float16"})
    build(model, f"a={folder}")


def test_another_base_is_a_warning(model: Path, folder: Path, caplog) -> None:
    path = folder / "adapter_config.json"
    given = json.loads(path.read_text())
    for base, warned in (("Meta/Llama-8B", False), ("meta/llama-8b/", False), ("Qwen/Qwen3-8B", True), (None, False)):
        path.write_text(json.dumps({**given, "base_model_name_or_path": base}))
        caplog.clear()
        build(model, f"a={folder}", model={"model": "some/Llama-8B"})
        assert ("was trained on 'Qwen/Qwen3-8B', and the model is 'some/Llama-8B'" in caplog.text) == warned
        assert warned or "was trained on" not in caplog.text


def test_names_may_have_any_known_prefix(model: Path, tmp_path: Path) -> None:
    found = []
    for number, prefix in enumerate(("model.", "", "model.language_model.", "language_model.model.")):
        shapes = {prefix + name.removeprefix("model."): shape for name, shape in linear_shapes(model).items()}
        write_adapter(tmp_path / str(number), shapes)
        found += Driver(build(model, f"a={tmp_path / str(number)}")).run([(prompt(9, 0), "a")])
    assert found == [found[0]] * 4


def test_reading_goes_on_after_an_unknown_fault(model: Path, folder: Path, monkeypatch) -> None:
    driver = Driver(build(model, lora_slots=1))

    def fail(*_: object) -> None:
        raise ValueError("what is this?")

    with monkeypatch.context() as context:
        context.setattr("roseinfer.adapters.memory.read_adapter", fail)
        assert read(driver, "a", folder).error == f"{folder}: ValueError: what is this?"
    assert read(driver, "a", folder).error is None


def test_a_directory_that_does_not_exist(model: Path, folder: Path, tmp_path: Path) -> None:
    for wrong in (tmp_path / "missing", folder / "adapter_config.json"):
        with pytest.raises(ConfigError, match=f"lora_dir: no such folder '{wrong}'"):
            build(model, lora_dir=str(wrong))


def test_models_that_return_vectors_have_no_adapters(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_dir: LoRA adapters are not supported by LlamaForCausalLM, which"):
        build(model, lora_slots=1, lora_dir=str(tmp_path), model={"runner": "pooling"})
    encoder = save_reference(make_encoder(next(iter(ENCODERS.values()))), tmp_path)
    with pytest.raises(ConfigError, match=r"not supported by .+, which returns vectors"):
        build(encoder, lora_slots=1)


def test_memory_that_is_short(model: Path, monkeypatch) -> None:
    monkeypatch.setattr("roseinfer.runner.build_adapters.available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="lower lora_slots or lora_max_rank"):
        build(model, lora_slots=8)
