"""ERNIE 4.5, dense (Baidu, 2025): Llama that rotates neighbouring numbers of a head."""

from roseinfer.models.decoder_config import read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec


def read_ernie(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.only("compression_ratio", 1.0)  # of positions, in configs of its first release
    attention = read_heads(fields, kv_heads=2, head_dim=128)
    bias = fields.flag("use_bias", False)
    return read_decoder(
        fields,
        architecture,
        attention=attention,
        rope=read_rope(fields, attention.head_dim, theta=500000.0, interleaved=True),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


FAMILIES = (ModelFamily(architectures=("Ernie4_5ForCausalLM",), read=read_ernie),)
