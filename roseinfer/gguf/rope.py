"""Rotary position embedding in GGUF: keys of the metadata, and tensors of divisors of the frequencies."""

import math
import struct
from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.metadata import MetadataFields
from roseinfer.gguf.reader import GgufFile

# Divisors of Llama 3.1 and its successors, and those of LongRoPE for contexts up to the original one and for longer.
_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# Tensors that become fields of the config.
CONFIG_TENSORS = frozenset({_DIVISORS, _SHORT, _LONG})
# The file stores the result of Llama 3.1's rule, not its parameters. Meta's published models share these values and
# differ only in the factor.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_MAX_RELATIVE_ERROR = 1e-4
_SCALINGS = ("none", "linear", "yarn", "longrope")


def rope_parameters(keys: MetadataFields, width: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json. Raise `UnsupportedModelError` for unknown scaling.

    keys: those of the architecture. width: rotated numbers of a head.
    """
    theta = keys.number("rope.freq_base") or 10000.0
    if theta < 1:
        keys.refuse("rope.freq_base", "a number of 1 or more is needed")
    kind = keys.text("rope.scaling.type") or "none"
    if kind not in _SCALINGS:
        keys.refuse("rope.scaling.type", f"known: {', '.join(_SCALINGS)}")
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    found = sorted(CONFIG_TENSORS & keys.file.tensors.keys())
    if found and kind not in ("none", "longrope"):
        keys.refuse("rope.scaling.type", f"the file also has {found[0]}")
    if found == [_DIVISORS] and kind == "none":
        return {"rope_theta": theta, **_llama3(keys.file, theta, width)}
    if found or kind == "longrope":
        return {"rope_theta": theta, **_longrope(keys, found, width)}
    if kind == "yarn":
        return {"rope_theta": theta, **_yarn(keys, factor)}
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _yarn(keys: MetadataFields, factor: float) -> dict[str, Any]:
    """Return YaRN's parameters. A factor of the magnitude other than the usual one means different things to configs
    and to llama.cpp.
    """
    if keys.number("rope.scaling.yarn_ext_factor") not in (None, 1.0):
        keys.refuse("rope.scaling.yarn_ext_factor", "only 1 is supported")
    magnitude = keys.number("rope.scaling.yarn_attn_factor")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    if magnitude is not None and abs(magnitude - usual) > _MAX_RELATIVE_ERROR * usual:
        keys.refuse("rope.scaling.yarn_attn_factor", f"only {usual:.6g} is supported, which follows from the factor")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.needed_integer("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow") or 1.0,
    }


def _longrope(keys: MetadataFields, found: list[str], width: int) -> dict[str, Any]:
    if found != [_LONG, _SHORT]:
        names = f"{_SHORT} and {_LONG} are needed, and no other divisors"
        raise UnsupportedModelError(
            f"{keys.file.path}: tensors of LongRoPE are {', '.join(found) or 'missing'}; {names}"
        )
    return {
        "rope_type": "longrope",
        "short_factor": list(_divisors(keys.file, _SHORT, width // 2)),
        "long_factor": list(_divisors(keys.file, _LONG, width // 2)),
        "original_max_position_embeddings": keys.needed_integer("rope.scaling.original_context_length"),
        "attention_factor": keys.needed_number("rope.scaling.attn_factor"),
    }


def _llama3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """Return the parameters that produce the file's divisors."""
    found = _divisors(file, _DIVISORS, width // 2)
    factor = max(found)
    if factor == min(found) == 1.0:
        return {"rope_type": "default"}
    expected = [_llama3_divisor(theta ** (-2 * i / width), factor) for i in range(len(found))]
    if any(abs(a - b) > _MAX_RELATIVE_ERROR * b for a, b in zip(found, expected, strict=True)):
        raise UnsupportedModelError(f"{file.path}: tensor {_DIVISORS} follows no known rule (supported: Llama 3.1's)")
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


def _divisors(file: GgufFile, name: str, count: int) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.encoding.name != "F32" or tensor.shape != (count,):
        shape = list(tensor.shape)
        raise UnsupportedModelError(f"{file.path}: tensor {name} is {shape} in {tensor.encoding.name}")
    with tensor.path.open("rb") as data:
        data.seek(tensor.start)
        raw = data.read(tensor.nbytes)
    values = struct.unpack(f"<{len(raw) // 4}f", raw)
    if len(values) != count or not all(0.0 < value < math.inf for value in values):
        raise UnsupportedModelError(f"{file.path}: tensor {name} is damaged")
    return values
