"""Weights that a folder's safetensors files store, counted by the files' headers."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from roseinfer.core.safetensors_header import loaded_files, read_header

_CODES_COUNT = {"I32": 8, "U8": 2}  # codes of four bits in a number of these dtypes
_LAYER_CODES = ("qweight", "weight_packed", "weight")  # ends of the names of tensors of codes
_EXPERT_CODES = ("_blocks",)  # in MXFP4


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Count of weights, some scales included. `four_bits`: a CPU rounds all of them to int8, if it has products in
    int8 and `quantization` is not set, because the files hold linear layers in four bits.
    """

    count: int
    four_bits: bool


def stored_weights(folder: Path) -> StoredWeights:
    """Count the weights in the files of a folder."""
    count, four_bits = 0, False
    for file in loaded_files(folder):
        for name, entry in read_header(file).items():
            codes_count = _CODES_COUNT.get(entry.dtype)
            if codes_count is None:
                count += prod(entry.shape)
            elif name.endswith(_LAYER_CODES + _EXPERT_CODES):
                count += prod(entry.shape) * codes_count
                four_bits |= name.endswith(_LAYER_CODES)
    return StoredWeights(count, four_bits)
