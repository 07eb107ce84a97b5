"""GLM-4 0414 (Zhipu AI, 2025): norms before and after each part, and neighbours of half a head rotated as pairs."""

from roseinfer.models.decoder_config import read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec


def read_glm4(fields: ConfigFields, architecture: str) -> ModelSpec:
    attention = read_heads(fields, kv_heads=2, head_dim=128)
    return read_decoder(
        fields,
        architecture,
        attention=attention,
        rope=read_rope(fields, attention.head_dim, partial=0.5, interleaved=True),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1.5625e-7)),
        qkv_bias=fields.flag("attention_bias", True),
    )


_NAMES = TensorNames(
    after_attention="post_self_attn_layernorm", up=("mlp.gate_up_proj",), after_mlp="post_mlp_layernorm"
)
FAMILIES = (ModelFamily(architectures=("Glm4ForCausalLM",), read=read_glm4, names=_NAMES),)
