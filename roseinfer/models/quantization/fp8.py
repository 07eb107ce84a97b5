"""Reader of Qwen's and DeepSeek's block scales, and of AutoFP8's scalars."""

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import HARMLESS, ignored
from roseinfer.quant.fp8_scheme import Fp8Scheme

BLOCK = [128, 128]


def read_fp8(fields: ConfigFields) -> Fp8Scheme:
    fields.only("fmt", "e4m3")
    fields.only("activation_scheme", "dynamic", "static")
    fields.only("scale_fmt", "float", hint="scales are any float32 numbers here")
    fields.only("kv_cache_scheme", "static")
    block = fields.get("weight_block_size")
    if block not in (None, BLOCK):
        fields.refuse("weight_block_size", block, "blocks are 128 x 128 here")
    names = ignored(fields, "modules_to_not_convert") + ignored(fields, "ignored_layers")
    fields.refuse_unread(HARMLESS)
    return Fp8Scheme("tensor" if block is None else "block", names)
