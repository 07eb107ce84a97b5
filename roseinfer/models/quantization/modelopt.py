"""Reader of modelopt's FP8 and NVFP4, from config.json or its own file."""

from typing import Literal

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import HARMLESS, ignored
from roseinfer.models.quantization.compressed_tensors import check_kv_cache
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.nvfp4_scheme import GROUP_COLUMNS, Nvfp4Scheme

# `quant_algo` covers the groups.
_HARMLESS = HARMLESS | {"config_groups"}
_FP8: dict[str, Literal["channel", "tensor"]] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def read_modelopt(fields: ConfigFields) -> Fp8Scheme | Nvfp4Scheme:
    """Read either form: all fields in one object, or within `quantization`."""
    quantization = fields.inner("quantization")
    if quantization is not None:
        fields.only("kv_cache_quant_algo", "FP8")
        fields.refuse_unread(HARMLESS)
    fields = quantization or fields
    algorithm = fields.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in (*_FP8, *_NVFP4):
        fields.refuse("quant_algo", algorithm, f"known: {', '.join((*_FP8, *_NVFP4))}")
    if algorithm in _NVFP4:
        fields.only("group_size", GROUP_COLUMNS)
    fields.only("kv_cache_quant_algo", "FP8")
    check_kv_cache(fields)
    names = ignored(fields, "exclude_modules") + ignored(fields, "ignore")
    fields.refuse_unread(_HARMLESS)
    return Nvfp4Scheme("modelopt", names) if algorithm in _NVFP4 else Fp8Scheme(_FP8[algorithm], names)
