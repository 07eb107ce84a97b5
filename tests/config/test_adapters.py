"""Options of LoRA adapters, and vLLM's names of them."""

from typing import Any

import pytest

from roseinfer.config.vllm_options import Translation
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.errors import ConfigError


def test_adapters_are_off_by_default() -> None:
    assert not AdapterConfig().enabled and AdapterConfig().slots == 0


@pytest.mark.parametrize("options", [{"lora": ("a=b",)}, {"lora_dir": "x"}, {"lora_slots": 8}, {"enable_lora": True}])
def test_each_of_these_options_enables_them(options: dict[str, Any]) -> None:
    assert AdapterConfig(**options).slots == 8


def test_names_and_paths() -> None:
    assert AdapterConfig(lora=("a=/x", "b=y=z")).named == {"a": "/x", "b": "y=z"}


@pytest.mark.parametrize(
    "options",
    [
        {"lora": ("a",)},
        {"lora": ("=a",)},
        {"lora": ("a=",)},
        {"lora": ("a=b", "a=c")},
        {"lora_slots": 0},
        {"lora_max_rank": 0},
        {"lora_host_size": 0.0},
        {"enable_lora": False, "lora_slots": 4},
    ],
)
def test_refusals(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AdapterConfig(**options)


@pytest.mark.parametrize(
    ("modules", "texts", "notes"),
    [
        (["a=/x", "b=/y"], ["a=/x", "b=/y"], 0),
        ('{"name": "a", "path": "/x"}', ["a=/x"], 0),
        ([{"name": "a", "path": "/x", "base_model_name": "m"}, "b=/y"], ["a=/x", "b=/y"], 1),
    ],
)
def test_lora_modules(modules: Any, texts: list[str], notes: int) -> None:
    translation = Translation()
    translation.add("lora_modules", modules)
    assert translation.options == {"lora": texts} and len(translation.notes) == notes


@pytest.mark.parametrize("modules", ["{", '{"name": "a"}', '{"path": "a"}', [3]])
def test_lora_modules_that_cannot_be_read(modules: Any) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        Translation().add("lora_modules", modules)
