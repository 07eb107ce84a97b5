"""Size of weights in memory, from the files' headers; without torch."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.stored_weights import stored_weights
from roseinfer.gguf.files import is_gguf, open_gguf
from roseinfer.gguf.reader import TensorInfo
from roseinfer.models.documents import weight_bytes
from roseinfer.quant.int4_scheme import GGUF_ENCODINGS, GGUF_GROUP_COLUMNS, Int4Scheme
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.scheme import QuantScheme

_WIDE_BYTES, _HALF_BYTES = 4, 2  # of a weight in float32, and in 16 bits


@dataclass(frozen=True, slots=True)
class LoadedSize:
    """Bytes of weights on a CPU as float32, as int8 if one with such products rounds them to that, and on a GPU.

    kinds: how the files store them. four_bits: a GPU keeps linear layers in four bits. as_stored: a GPU keeps all
    weights as the files store them.
    """

    kinds: str
    float_bytes: int
    int8_bytes: int | None
    gpu_bytes: int
    four_bits: bool
    as_stored: bool = False


def loaded_size(model: Path, scheme: QuantScheme | None) -> LoadedSize:
    """Return the size of the weights of a GGUF file or of a folder.

    Raise `UnsupportedModelError` for files without tensors, such as links to large files that were not downloaded.
    """
    if is_gguf(model):
        return _gguf_size(list(open_gguf(model).tensors.values()), four_bits=scheme is not None)
    count, stored_bytes = stored_weights(model).count, weight_bytes(model)
    if count == 0:
        raise UnsupportedModelError(f"{model}: its safetensors files hold no tensors; were they downloaded as a whole?")
    kinds = "floats" if scheme is None else scheme.label
    four_bits = isinstance(scheme, Int4Scheme | Nvfp4Scheme)
    int8_bytes = count if four_bits else None
    return LoadedSize(kinds, count * _WIDE_BYTES, int8_bytes, stored_bytes, four_bits, as_stored=True)


def _gguf_size(tensors: list[TensorInfo], *, four_bits: bool) -> LoadedSize:
    counts: Counter[str] = Counter()
    gpu_bytes = 0
    wide = all(tensor.encoding.name == "F32" for tensor in tensors)  # then a GPU computes in float32
    for tensor in tensors:
        kind, count = tensor.encoding.name, prod(tensor.shape)
        counts[kind] += count
        kept = kind in GGUF_ENCODINGS and len(tensor.shape) > 1
        gpu_bytes += _kept_bytes(kind, count) if kept else count * (_WIDE_BYTES if wide else _HALF_BYTES)
    kinds = ", ".join(name for name, _ in counts.most_common())
    return LoadedSize(kinds, counts.total() * _WIDE_BYTES, None, gpu_bytes, four_bits)


def _kept_bytes(kind: str, count: int) -> int:
    """Return the size of weights that stay in four bits: with a scale for each group, and in Q4_K an offset."""
    numbers = 1 if kind == "Q4_0" else 2
    return count // 2 + count // GGUF_GROUP_COLUMNS * numbers * _HALF_BYTES
