"""Readers of a checkpoint's quantisation from config.json or a file of its tool: a file for each method; without torch.

Supported are FP8 (e4m3) with a scale for each matrix, output channel or block of 128 x 128, four bits in groups of
columns, and MXFP4 for experts. All else is refused by name.
"""

from collections.abc import Callable
from pathlib import Path

from roseinfer.core.json_file import read_object
from roseinfer.gguf.files import is_gguf
from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.awq import read_awq
from roseinfer.models.quantization.compressed_tensors import read_compressed_tensors
from roseinfer.models.quantization.fp8 import read_fp8
from roseinfer.models.quantization.gguf import read_gguf_scheme
from roseinfer.models.quantization.gptq import read_gptq
from roseinfer.models.quantization.modelopt import read_modelopt
from roseinfer.models.quantization.mxfp4 import read_mxfp4_scheme
from roseinfer.quant.scheme import QuantScheme

_KEY = "quantization_config"
Reader = Callable[[ConfigFields], QuantScheme]
_READERS: dict[str, Reader] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4_scheme,
    "awq": read_awq,
    "gptq": read_gptq,
}
# Files of tools, for checkpoints whose config.json says nothing.
_FILES: dict[str, Reader] = {
    "hf_quant_config.json": read_modelopt,
    "quant_config.json": read_awq,
    "quantize_config.json": read_gptq,
}


def read_quantization(config: ConfigFields, folder: Path) -> QuantScheme | None:
    """Return how the checkpoint in `folder` is quantised; None if its weights are floats, or read as floats from the
    GGUF file at that path. `config`: its config.json.

    Raise `UnsupportedModelError` naming the field that is not supported.
    """
    if is_gguf(folder):
        return read_gguf_scheme(folder)
    fields = config.inner(_KEY)
    if fields is None:
        for name, reader in _FILES.items():
            path = folder / name
            if path.is_file():
                return reader(ConfigFields(read_object(path), str(path)))
        return None
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        fields.refuse("quant_method", method, f"known: {', '.join(_READERS)}")
    return _READERS[method](fields)
