"""Reader of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load as load_safetensors

from roseinfer.adapters.config import CONFIG_FILE, PeftConfig
from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.core.json_file import field_name, shortened

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAX_HEADER_BYTES = 1 << 24
_MAX_NAMED_COUNT = 5
# No model has longer names. Patterns of a config take time that grows with the third power of the length.
MAX_NAME_CHARS = 256
MAX_TENSOR_COUNT = 1 << 16
# PyTorch computes so many elements in the calling thread. More threads would take the cores of a running step.
MAX_ALONE_ELEMENTS = 1 << 15


class LowRank(NamedTuple):
    """Change of a matrix [out, in] by scale * B @ A: a [rank, in], b [out, rank], as the file stores them."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """Content of an adapter's folder.

    `changes`: by path of a module in the model, as the file has it without PEFT's prefix.
    """

    folder: Path
    config: PeftConfig
    digest: str
    changes: dict[str, LowRank]

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(change.rank for change in self.changes.values())


def read_adapter(folder: Path, max_rank: int, max_bytes: int) -> AdapterFile:
    """Read the adapter in `folder`. max_bytes: size of the tensors of the largest adapter of rank `max_rank`.

    Raise `ModelNotFoundError` if a file is missing, and `UnsupportedModelError` naming a field or tensor that is
    invalid or not supported.
    """
    config = PeftConfig.read(folder)
    if config.max_rank > max_rank:
        raise UnsupportedModelError(
            f"{folder / CONFIG_FILE}: a rank is {shortened(config.max_rank)}, more than lora_max_rank ({max_rank})"
        )
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        if (folder / _PICKLE_FILE).is_file():
            raise UnsupportedModelError(
                f"{folder}: {_PICKLE_FILE} is a pickle, which could run any code (save {WEIGHTS_FILE} instead)"
            )
        raise ModelNotFoundError(f"{folder} holds no {WEIGHTS_FILE}")
    try:
        tensors = _load(path, max_bytes)
        changes = _changes(tensors, config)
    except _TensorError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    return AdapterFile(folder, config, _digest(tensors, config), changes)


class _TensorError(Exception):
    """Unusable file or tensor; the message names it."""


def some_of(names: list[str]) -> str:
    """Return the first names, as a message lists them."""
    more = len(names) - _MAX_NAMED_COUNT
    return ", ".join(names[:_MAX_NAMED_COUNT]) + (f" and {more} more" if more > 0 else "")


def _load(path: Path, max_bytes: int) -> dict[str, torch.Tensor]:
    """Read a file at once: the process would crash if a mapped file became shorter."""
    most = max_bytes + _MAX_HEADER_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _TensorError(f"cannot be read: {error.strerror}") from None
    if len(data) > most:
        raise _TensorError(f"the file has more than {most} bytes, the size of an adapter of the largest rank")
    try:
        return load_safetensors(data)
    except Exception as error:  # the library raises several types for invalid content
        raise _TensorError(f"not a safetensors file: {error}") from None


def _changes(tensors: Mapping[str, torch.Tensor], config: PeftConfig) -> dict[str, LowRank]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    unknown = []
    if len(tensors) > MAX_TENSOR_COUNT:
        raise _TensorError(f"there are {len(tensors)} tensors, more than {MAX_TENSOR_COUNT}")
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name) if len(name) <= MAX_NAME_CHARS and name.isprintable() else None
        if match is None:
            unknown.append(field_name(name))
            continue
        pair = found.setdefault(match[1].removeprefix(_PREFIX), {})
        if match[2] in pair:
            raise _TensorError(f"tensor {name} is there twice, with and without {_PREFIX!r}")
        pair[match[2]] = tensor
    if unknown:
        raise _TensorError(f"no matrix A or B of a linear layer: {some_of(sorted(unknown))}")
    if not found:
        raise _TensorError("there are no tensors")
    return {module: _change(module, pair, config) for module, pair in sorted(found.items())}


def _change(module: str, pair: Mapping[str, torch.Tensor], config: PeftConfig) -> LowRank:
    for side in "AB":
        name = f"{module}.lora_{side}.weight"
        if side not in pair:
            raise _TensorError(f"tensor {name} is missing")
        if pair[side].dtype not in _DTYPES:
            raise _TensorError(f"tensor {name} has dtype {str(pair[side].dtype).removeprefix('torch.')}")
        rank = config.rank_of(module)
        if pair[side].ndim != 2 or pair[side].shape["AB".index(side)] != rank:
            raise _TensorError(f"tensor {name} is {list(pair[side].shape)}, but the config says rank {rank}")
        if not is_finite(pair[side]):
            raise _TensorError(f"tensor {name} holds NaN or infinity")
    return LowRank(pair["A"], pair["B"], config.scale_of(module))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True without NaN and infinity. Both show in the extremes, whose search is many times as fast as
    `isfinite`.
    """
    parts = tensor.reshape(-1).split(MAX_ALONE_ELEMENTS) if tensor.numel() else ()
    return all(math.isfinite(extreme.item()) for part in parts for extreme in torch.aminmax(part))


def _digest(tensors: Mapping[str, torch.Tensor], config: PeftConfig) -> str:
    """Return the SHA-256 of the tensors and of all that the config says about them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name)
        assert match is not None
        module = match[1].removeprefix(_PREFIX)
        head = (module, match[2], str(tensor.dtype), list(tensor.shape), config.scale_of(module).hex())
        digest.update(repr(head).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
