"""Mutated JSON files of a model: each is read, or refused with one line that names the file."""

import json
import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.models.generation import read_generation_config
from roseinfer.models.loader import weight_files
from roseinfer.text.tokenizer import Tokenizer
from tests.models.test_config import GPT2, LLAMA, LLAMA3, MISTRAL, QWEN3, QWEN3_MOE
from tests.text.tokenizers import byte_level

FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
    "ignore": ["lm_head", "re:.*gate"],
}
CONFIGS = [
    GPT2,
    {**LLAMA, "rope_scaling": LLAMA3, "eos_token_id": [1, 2]},
    {**MISTRAL, "sliding_window": 512, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    {**QWEN3, "quantization_config": FP8, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    QWEN3_MOE,
]
GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "eos_token_id": [3, 4],
    "pad_token_id": 0,
}
TOKENIZER_CONFIG = {
    "bos_token": "<|endoftext|>",
    "eos_token": {"content": "<|end|>", "special": True, "lstrip": False},
    "pad_token": None,
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>"}},
    "chat_template": [{"name": "default", "template": "{{ bos_token }}"}, {"name": "tools", "template": "x"}],
    "model_max_length": 10**30,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
INDEX = {
    "metadata": {"total_size": 10},
    "weight_map": {"a.weight": "model.safetensors", "b.weight": "model.safetensors"},
}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
HOSTILE = [
    *(None, True, False, 0, -1, 1, 3, 2**24 + 1, 2**31, 2**32 - 1, 2**63, 2**64, 10**30, -(10**30), 10**400),
    *(0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "NaN", "\ud800", "\x00", "../x", "x" * 10_000, "{% for %}"),
    *([], [[]], [1, 2], [None], [10**30], ["\udfff"], {}, {"a": None}, {"content": 5}, [{"name": 1}], {"\ud800": 1}),
    *([{"template": 1}], {"default": [1]}, [[[[[[[[1]]]]]]]]),
]
TEXTS = [
    b"",
    b"null",
    b"[1]",
    b'"x"',
    b"{",
    b"\xff\xfe{}",
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"a": 1' + b"0" * 5000 + b"}",
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def mutated(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    made = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(list(places(made)) or [(made, "a")])
        what = rng.random()
        if what < 0.1 and isinstance(holder, dict):
            holder.pop(key, None)
        elif what < 0.2 and isinstance(holder, dict):
            holder[rng.choice(["\ud800", "", "x" * 1000, "type", "rope_scaling"])] = holder.pop(key, None)
        else:
            holder[key] = deepcopy(rng.choice(HOSTILE))
    return made


def assert_finite(value: Any) -> None:
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            assert_finite(inner)
    elif isinstance(value, float):
        assert math.isfinite(value)
    elif isinstance(value, int):
        assert abs(value) < 2**63


def check_mutations(config: dict[str, Any], folder: Path, read: Callable[[Path], Any], seed: int) -> None:
    """Check that `read` takes or refuses each mutation of a config, in one line that names the file."""
    rng, accepted = random.Random(seed), 0
    for _ in range(150):
        (folder / "config.json").write_text(json.dumps(mutated(config, rng)))
        try:
            assert_finite(asdict(read(folder)))
            accepted += 1
        except UnsupportedModelError as error:
            assert "config.json" in str(error) and "\n" not in str(error)
    assert 0 < accepted < 150


def read_config(folder: Path) -> None:
    assert_finite(asdict(read_model_spec(folder)))
    assert_finite(asdict(read_generation_config(folder)))


def read_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    json.dumps([tokenizer.special_tokens, tokenizer.chat_template]).encode()
    tokenizer.encode("hello")


FILES: dict[str, tuple[list[dict[str, Any]], Callable[[Path], Any]]] = {
    "config.json": (CONFIGS, read_config),
    "generation_config.json": ([GENERATION], read_config),
    "tokenizer_config.json": ([TOKENIZER_CONFIG], read_tokenizer),
    "model.safetensors.index.json": ([INDEX], weight_files),
    "hf_quant_config.json": ([MODELOPT], read_config),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def check(folder: Path, name: str, data: bytes, read: Callable[[Path], Any]) -> bool:
    """True if the file was accepted."""
    (folder / name).write_bytes(data)
    try:
        read(folder)
    except (UnsupportedModelError, ModelNotFoundError) as error:
        assert str(folder) in str(error) and "\n" not in str(error) and len(str(error)) < 1000 + len(str(folder)), data
        return False
    except Exception as error:
        raise AssertionError(f"{name} = {data[:2000]!r} raised {error!r}") from error
    return True


@pytest.mark.parametrize("name", FILES)
def test_mutated_files_are_read_or_refused(folder: Path, name: str) -> None:
    documents, read = FILES[name]
    for document in documents:
        assert check(folder, name, json.dumps(document).encode(), read), "what is mutated is valid"
    rng = random.Random(f"28 {name}")
    accepted = [check(folder, name, json.dumps(mutated(rng.choice(documents), rng)).encode(), read) for _ in range(200)]
    assert 0 < sum(accepted) < len(accepted)


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_objects_are_refused(folder: Path, name: str) -> None:
    for text in TEXTS:
        assert not check(folder, name, text, FILES[name][1]), text[:20]
