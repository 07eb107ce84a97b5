"""Hunyuan dense (Tencent, 2025): Llama with norms of heads after their rotation, and a larger base of it."""

from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.decoder_config import read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec

# Configs on the hub list options of related models. These parts are the dense model's.
_ONLY = {
    "mlp_bias": False,
    "norm_type": "rms",
    "num_experts": 1,
    "position_embedding_xdrope": False,
    "use_cla": False,
    "use_mla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
_UNUSED = """
    add_classification_head anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views cla_share_factor
    class_num dense_list enable_lm_head_fp32 eod_token_id group_limited_greedy im_end_id im_newline_id im_start_id
    image_token_id mask_init_id norm_topk_prob num_media_embeds num_shared_expert org_vocab_size pad_id pool_type
    routed_scaling_factor skip_cls_token text_end_id text_start_id topk_group video_end_id video_start_id
""".split()  # noqa: SIM905


def read_hunyuan(fields: ConfigFields, architecture: str) -> ModelSpec:
    for key, value in _ONLY.items():
        fields.only(key, value)
    fields.ignore(*_UNUSED)
    attention = _read_heads(fields)
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        attention=attention,
        rope=read_rope(fields, attention.head_dim, aliases={"dynamic": "ntk_alpha"}),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        qk_norm="head_after_rotation",
        qkv_bias=bias,
        o_bias=bias,
    )


def _read_heads(fields: ConfigFields) -> AttentionSpec:
    """Return heads whose width is `head_dim`, or `attention_head_dim` in older configs."""
    newer, older = fields.get("head_dim"), fields.get("attention_head_dim")
    if older is None:
        return read_heads(fields)
    if newer not in (None, older):
        fields.refuse("attention_head_dim", older, f"head_dim = {newer}")
    return read_heads(fields, head_dim=fields.integer("attention_head_dim"))


_NAMES = TensorNames(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))
FAMILIES = (ModelFamily(architectures=("HunYuanDenseV1ForCausalLM",), read=read_hunyuan, names=_NAMES),)
