"""Reader of modelopt's FP8, from config.json or its own file."""

from typing import Literal

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import HARMLESS, ignored
from roseinfer.models.quantization.compressed_tensors import check_kv_cache
from roseinfer.quant.fp8_scheme import Fp8Scheme

# `quant_algo` covers the groups.
_HARMLESS = HARMLESS | {"config_groups"}
_ALGORITHMS: dict[str, Literal["channel", "tensor"]] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}


def read_modelopt(fields: ConfigFields) -> Fp8Scheme:
    """Read either form: all fields in one object, or within `quantization`."""
    quantization = fields.inner("quantization")
    if quantization is not None:
        fields.only("kv_cache_quant_algo", "FP8")
        fields.refuse_unread(HARMLESS)
    fields = quantization or fields
    algorithm = fields.get("quant_algo")
    layout = _ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if layout is None:
        fields.refuse("quant_algo", algorithm, f"known: {', '.join(_ALGORITHMS)}")
    fields.only("kv_cache_quant_algo", "FP8")
    check_kv_cache(fields)
    names = ignored(fields, "exclude_modules") + ignored(fields, "ignore")
    fields.refuse_unread(_HARMLESS)
    return Fp8Scheme(layout, names)
