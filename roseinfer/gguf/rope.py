"""Rotary scaling in GGUF: two keys of the metadata, or a tensor of divisors for Llama 3.1 and its successors."""

import math
import struct
from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.metadata import MetadataFields
from roseinfer.gguf.reader import GgufFile

DIVISORS = "rope_freqs.weight"
# The file stores the result of Llama 3.1's rule, not its parameters. Meta's published models share these values and
# differ only in the factor.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_MAX_RELATIVE_ERROR = 1e-4


def rope_parameters(file: GgufFile, fields: MetadataFields, arch: str, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json. Raise `UnsupportedModelError` for unknown scaling."""
    theta = fields.number(f"{arch}.rope.freq_base") or 10000.0
    if theta < 1:
        fields.refuse(f"{arch}.rope.freq_base", "a number of 1 or more is needed")
    kind = fields.text(f"{arch}.rope.scaling.type") or "none"
    factor = fields.number(f"{arch}.rope.scaling.factor") or fields.number(f"{arch}.rope.scale_linear") or 1.0
    if kind not in ("none", "linear"):
        fields.refuse(f"{arch}.rope.scaling.type", "known: none, linear")
    if DIVISORS in file.tensors:
        if kind != "none":
            fields.refuse(f"{arch}.rope.scaling.type", f"the file also has {DIVISORS}")
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters that produce the file's divisors."""
    found = _divisors(file, head_dim // 2)
    factor = max(found)
    if factor == min(found) == 1.0:
        return {"rope_type": "default"}
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), factor) for i in range(len(found))]
    if any(abs(a - b) > _MAX_RELATIVE_ERROR * b for a, b in zip(found, expected, strict=True)):
        raise UnsupportedModelError(f"{file.path}: tensor {DIVISORS} follows no known rule (supported: Llama 3.1's)")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _llama3_divisor(frequency: float, factor: float) -> float:
    """Return Llama 3.1's divisor of a frequency.

    Long wavelengths are stretched by `factor`, short ones are not, and those between use a mixture of both frequencies.
    """
    wavelength = 2 * math.pi / frequency
    smooth = (_ORIGINAL / wavelength - _LOW) / (_HIGH - _LOW)
    smooth = min(max(smooth, 0.0), 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _divisors(file: GgufFile, count: int) -> tuple[float, ...]:
    tensor = file.tensors[DIVISORS]
    if tensor.encoding.name != "F32" or tensor.shape != (count,):
        shape = list(tensor.shape)
        raise UnsupportedModelError(f"{file.path}: tensor {DIVISORS} is {shape} in {tensor.encoding.name}")
    with tensor.path.open("rb") as data:
        data.seek(tensor.start)
        raw = data.read(tensor.nbytes)
    values = struct.unpack(f"<{len(raw) // 4}f", raw)
    if len(values) != count or not all(math.isfinite(value) and value >= 1.0 for value in values):
        raise UnsupportedModelError(f"{file.path}: tensor {DIVISORS} is damaged")
    return values
