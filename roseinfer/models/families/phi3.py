"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Abdin et al., 2024): Llama with stacked projections, and LongRoPE for contexts
of 128k.
"""

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_one_window
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec

# Earlier names of "longrope". What they call "yarn" is not YaRN.
_ROPE_ALIASES = {"su": "longrope", "yarn": "longrope"}


def read_phi3(fields: ConfigFields, architecture: str) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(key, False)
    for key in ("full_attention_mod", "interpolate_factor"):
        fields.only(key, 1)
    attention = read_heads(fields)
    rope = read_rope(fields, attention.head_dim, partial=1.0, aliases=_ROPE_ALIASES)
    if rope.scaling not in ("default", "longrope"):
        fields.refuse("rope_scaling", rope.scaling, "Phi-3 has default and longrope")
    if rope.scaling == "longrope":
        # transformers takes the original context from here, by default 4096, even if rope_parameters has one.
        fields.need("original_max_position_embeddings")
    original = fields.get("original_max_position_embeddings")
    if rope.scaling == "longrope" and rope.original_max_position != original:
        fields.refuse("original_max_position_embeddings", original, f"rope has {rope.original_max_position:g}")
    window = optional_integer(fields, "sliding_window", None)
    return read_decoder(
        fields,
        architecture,
        windows=read_one_window(fields, window, "Phi-3"),
        attention=attention,
        rope=rope,
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
    )


_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
FAMILIES = (ModelFamily(architectures=("Phi3ForCausalLM",), read=read_phi3, names=_NAMES),)
