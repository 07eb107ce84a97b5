"""JSON documents that describe a checkpoint, from a folder or from a GGUF file."""

from pathlib import Path
from typing import Any

from roseinfer.core.errors import ModelNotFoundError
from roseinfer.core.generation_config import DOCUMENT as GENERATION
from roseinfer.core.json_file import read_object
from roseinfer.core.safetensors_header import loaded_files, read_header
from roseinfer.gguf.config import config_of, generation_config_of
from roseinfer.gguf.files import is_gguf, open_gguf
from roseinfer.gguf.windows import UnrecordedWindow, unrecorded_window

CONFIG = "config.json"
# Dtypes of configs by the names that safetensors gives to dtypes in which models are computed.
_DTYPES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_config(model: Path) -> dict[str, Any]:
    """Return config.json, with the dtype of the weights as `dtype` if the file does not state any.

    Raise `ModelNotFoundError` if the file is missing, `UnsupportedModelError` if it cannot be read.
    """
    if is_gguf(model):
        return config_of(open_gguf(model))
    if not (model / CONFIG).is_file():
        raise ModelNotFoundError(f"{model} holds no {CONFIG}")
    config = read_object(model / CONFIG)
    text = text_fields(config)
    if text.get("dtype") is None and text.get("torch_dtype") is None:
        config["dtype"] = _stored_dtype(model)
    return config


def _stored_dtype(folder: Path) -> str | None:
    """Return the dtype of the first floating-point tensor by name in the first file, as `transformers` does; None
    without one.
    """
    for file in loaded_files(folder)[:1]:
        for _, tensor in sorted(read_header(file).items()):
            if tensor.dtype in _DTYPES:
                return _DTYPES[tensor.dtype]
    return None


def text_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model in a config that may describe others too."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    return config | {key: value for key, value in inner.items() if value is not None}


def read_generation(model: Path) -> dict[str, Any]:
    """Return generation_config.json, or nothing if the model has none. Raise like `read_config`."""
    if is_gguf(model):
        return generation_config_of(open_gguf(model))
    path = model / GENERATION
    return read_object(path) if path.is_file() else {}


def document_path(model: Path, document: str) -> Path:
    """Return the path that error messages name for `document`."""
    return model if is_gguf(model) else model / document


def find_unrecorded_window(model: Path) -> UnrecordedWindow | None:
    """Return the window that the original of a GGUF file has and the file does not record, if it is known."""
    return unrecorded_window(open_gguf(model)) if is_gguf(model) else None


def weight_bytes(model: Path) -> int:
    """Return the size of the files that weights are read from; 0 if there are none."""
    if is_gguf(model):
        return sum(tensor.nbytes for tensor in open_gguf(model).tensors.values())
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))
