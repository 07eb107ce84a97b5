"""Dtype of a model whose config states none: that of its weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from roseinfer.models.config import read_model_spec
from roseinfer.models.encoders.registry import read_encoder_spec
from tests.models.encoders.test_config import MODERNBERT
from tests.models.test_config import LLAMA
from tests.models.test_family_configs import MISTRAL3

NOTHING = {"dtype": None, "torch_dtype": None}
# Bytes of a file that may hold the weights of these configs.
FILE_BYTES = 1 << 30


def save(path: Path, **dtypes: torch.dtype) -> None:
    """Write a file of empty tensors; it is made long without taking room."""
    save_file({name: torch.zeros(0, dtype=dtype) for name, dtype in dtypes.items()}, path)
    with path.open("r+b") as file:
        file.truncate(FILE_BYTES)


def dtype_of(folder: Path, config: dict[str, Any], read: Any = read_model_spec) -> str:
    (folder / "config.json").write_text(json.dumps({**config, **NOTHING}))
    return read(folder).dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_first_weights_in_floating_point_have_the_dtype(tmp_path: Path, dtype: str) -> None:
    stored = getattr(torch, dtype)
    save(tmp_path / "model.safetensors", c=torch.float64, b=stored, a=torch.float8_e4m3fn)
    assert dtype_of(tmp_path, LLAMA) == dtype
    assert dtype_of(tmp_path, MODERNBERT, read_encoder_spec) == dtype
    assert dtype_of(tmp_path, MISTRAL3) == dtype, "neither the config nor that of the text states one"
    text = {**MISTRAL3["text_config"], "torch_dtype": "float16"}
    assert dtype_of(tmp_path, {**MISTRAL3, "text_config": text}) == "float16"


def test_of_shards_the_first_one_counts(tmp_path: Path) -> None:
    names = {"a": "2.safetensors", "b": "1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save(tmp_path / "2.safetensors", a=torch.float32)
    save(tmp_path / "1.safetensors", b=torch.bfloat16)
    save(tmp_path / "model.safetensors", c=torch.float16)
    assert dtype_of(tmp_path, LLAMA) == "bfloat16"


BROKEN = [
    None,
    b"",
    b"\xff" * 8,
    b"[]",
    b'{"a":"b"}',
    b'{"a":{"shape":[]}}',
    b'{"a":{"dtype":["F16"],"shape":[]}}',
    b'{"a":{"dtype":"F16","shape":["x"]}}',
    b'{"a":{"dtype":"F16","shape":[1e999]}}',
    b"{}",
]


@pytest.mark.parametrize("header", BROKEN)
def test_without_readable_weights_it_is_float32(tmp_path: Path, header: bytes | None) -> None:
    if header is not None:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(FILE_BYTES)
    assert dtype_of(tmp_path, LLAMA) == "float32"


@pytest.mark.parametrize("names", [{}, {"a": "missing.safetensors"}, {"a": 1}, {"a": []}, {"a": "\0"}, [], None])
def test_without_a_readable_index_it_is_float32(tmp_path: Path, names: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert dtype_of(tmp_path, LLAMA) == "float32"
