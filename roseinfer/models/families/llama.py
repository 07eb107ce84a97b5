"""Llama (Touvron et al., 2023) and models of its shape."""

from roseinfer.models.decoder_config import read_decoder
from roseinfer.models.families.family import STORED_FREQUENCIES, ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_windows
from roseinfer.models.spec import ModelSpec


def read_llama(fields: ConfigFields, architecture: str) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        windows=read_windows(fields, None, 0),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILIES = (ModelFamily(architectures=("LlamaForCausalLM",), read=read_llama, ignored=STORED_FREQUENCIES),)
