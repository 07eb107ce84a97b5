"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from roseinfer.models.decoder_config import read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ModelSpec


def read_seed_oss(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.get("residual_dropout")  # training only
    return read_decoder(
        fields,
        architecture,
        attention=read_heads(fields, kv_heads=8, head_dim=128),
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILIES = (ModelFamily(architectures=("SeedOssForCausalLM",), read=read_seed_oss),)
