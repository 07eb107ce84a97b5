"""The documents that describe a checkpoint, as plain JSON: of a folder, or of the GGUF file that stands for one."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ModelNotFoundError
from roseinfer.core.json_file import read_object
from roseinfer.gguf.config import config_of, generation_config_of
from roseinfer.gguf.files import is_gguf, open_gguf

CONFIG = "config.json"
GENERATION = "generation_config.json"


def read_config(model: Path) -> dict[str, Any]:
    """config.json. Raises `ModelNotFoundError` without one, `UnsupportedModelError` for one that cannot be read."""
    if is_gguf(model):
        return config_of(open_gguf(model))
    if not (model / CONFIG).is_file():
        raise ModelNotFoundError(f"{model} holds no {CONFIG}")
    return read_object(model / CONFIG)


def read_generation(model: Path) -> dict[str, Any]:
    """generation_config.json, which a model may do without. Raises like `read_config`."""
    if is_gguf(model):
        return generation_config_of(open_gguf(model))
    path = model / GENERATION
    return read_object(path) if path.is_file() else {}


def document_path(model: Path, document: str) -> Path:
    """Where a message says that something stands."""
    return model if is_gguf(model) else model / document


def widened_weights(model: Path) -> tuple[int, str] | None:
    """How many weights a GGUF file has, and in which encodings, the commonest first; None for a folder."""
    if not is_gguf(model):
        return None
    counts: Counter[str] = Counter()
    for tensor in open_gguf(model).tensors.values():
        counts[tensor.encoding.name] += prod(tensor.shape)
    return counts.total(), ", ".join(name for name, _ in counts.most_common())


def weight_bytes(model: Path) -> int:
    """Of the files that weights are read from; 0 if there are none."""
    if is_gguf(model):
        return sum(tensor.nbytes for tensor in open_gguf(model).tensors.values())
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))
