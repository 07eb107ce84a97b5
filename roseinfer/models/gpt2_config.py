"""Reader of GPT-2's config.json, without torch."""

from roseinfer.models.decoder_config import ACTIVATIONS, read_dtype
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ModelSpec


def read_gpt2(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    fields.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        fields.only(key, False)
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden % heads:
        fields.refuse("n_head", heads, f"it does not divide n_embd = {hidden}")
    return ModelSpec(
        architecture=architecture,
        num_layers=fields.integer("n_layer"),
        hidden_size=hidden,
        intermediate_size=fields.integer("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("n_positions"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        rope=None,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        dtype=read_dtype(fields),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
