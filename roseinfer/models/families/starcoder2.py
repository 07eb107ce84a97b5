"""StarCoder2 (Lozhkov et al., 2024): LayerNorm, biases and a feed-forward network without a gate."""

from roseinfer.models.decoder_config import ACTIVATIONS, optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import STORED_FREQUENCIES, ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_one_window
from roseinfer.models.spec import ModelSpec, NormSpec

# Configs on the hub describe the architecture in words too.
_ONLY = {
    "activation_function": "gelu_pytorch_tanh",
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "scale_attn_weights": True,
}
_UNUSED = (
    "attention_softmax_in_fp32",
    "embedding_dropout",
    "layer_norm_epsilon",  # transformers reads norm_epsilon
    "residual_dropout",
    "scale_attention_softmax_in_fp32",
)


def read_starcoder2(fields: ConfigFields, architecture: str) -> ModelSpec:
    for key, value in _ONLY.items():
        fields.only(key, value)
    fields.ignore(*_UNUSED)
    window = optional_integer(fields, "sliding_window", None)
    bias = fields.flag("use_bias", True)
    return read_decoder(
        fields,
        architecture,
        attention=read_heads(fields, kv_heads=2),
        windows=read_one_window(fields, window, "StarCoder2"),
        norm=NormSpec(eps=fields.number("norm_epsilon", 1e-5), kind="layer"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


_NAMES = TensorNames(up=("mlp.c_fc",), down="mlp.c_proj")
FAMILIES = (
    ModelFamily(
        architectures=("Starcoder2ForCausalLM",), read=read_starcoder2, names=_NAMES, ignored=STORED_FREQUENCIES
    ),
)
