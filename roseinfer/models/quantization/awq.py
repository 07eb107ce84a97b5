"""Reader of AWQ's config, from config.json or AutoAWQ's own file."""

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import ignored
from roseinfer.models.quantization.int4 import HARMLESS_RECIPE, check_bits, group_size
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme

# The zeros of all groups are stored, whatever this says.
_HARMLESS = HARMLESS_RECIPE | {"sym"}
_OTHER_PACKING = "llm-awq"  # all other backends are choices of kernels


def read_awq(fields: ConfigFields) -> Int4Scheme:
    """Read the fields, of which older files call two otherwise."""
    check_bits(fields, "w_bit" if fields.get("bits") is None else "bits")
    size = group_size(fields, "q_group_size" if fields.get("group_size") is None else "group_size")
    fields.ignore("w_bit", "q_group_size")
    fields.only("quant_method", "awq")
    for key in ("version", "format", "checkpoint_format"):
        fields.only(key, "gemm", "GEMM", hint="known: gemm")
    if fields.get("backend") == _OTHER_PACKING:
        fields.refuse("backend", _OTHER_PACKING, "known: autoawq and other names of kernels")
    fields.only("zero_point", True)
    fields.only("pack_dtype", "int32")
    names = ignored(fields, "modules_to_not_convert")
    fields.refuse_unread(_HARMLESS)
    return Int4Scheme("awq", Int4Groups(size, symmetric=False), ignored=names)
