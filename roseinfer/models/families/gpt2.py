"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, GELU, and matrices stored as [in, out]."""

from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.decoder_config import ACTIVATIONS, read_dtype
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ModelSpec, NormSpec, uniform_layers


def read_gpt2(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        fields.only(key, False)
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden % heads:
        fields.refuse("n_head", heads, f"it does not divide n_embd = {hidden}")
    head_dim = hidden // heads
    attention = AttentionSpec(heads=heads, kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5)
    return ModelSpec(
        architecture=architecture,
        layers=uniform_layers(fields.num_layers("n_layer"), attention, None),
        hidden_size=hidden,
        intermediate_size=fields.integer("n_inner", 4 * hidden),
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("n_positions"),
        norm=NormSpec(eps=fields.number("layer_norm_epsilon", 1e-5), kind="layer"),
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        dtype=read_dtype(fields),
        learned_positions=True,
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


_NAMES = TensorNames(
    tokens="wte",
    positions="wpe",
    block="h.{}",
    norm="ln_f",
    before_attention="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    before_mlp="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
)
FAMILIES = (
    ModelFamily(
        architectures=("GPT2LMHeadModel",),
        read=read_gpt2,
        names=_NAMES,
        # Checkpoints on the hub have no prefix; transformers saves one.
        prefixes=("", "transformer."),
        # Old checkpoints carry the causal mask as a tensor.
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    ),
)
