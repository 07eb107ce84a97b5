"""gpt-oss (OpenAI, 2025): attention sinks, windows in alternate layers, and experts with biases in all layers."""

from dataclasses import replace

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.experts_config import read_experts
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL, SLIDING, read_layers
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec
from roseinfer.quant.expert_names import ExpertNames, StackedExpertNames

_DEFAULT_WINDOW_TOKENS = 128
_DEFAULT_THETA = 150000.0


def read_gpt_oss(fields: ConfigFields, architecture: str) -> ModelSpec:
    if fields.get("torch_dtype") is None:
        fields.assume(dtype="bfloat16")  # of random weights: published configs state none, and experts need 16 bits
    fields.only("hidden_act", "silu")  # as a part of the experts' own activation, which the next two describe
    fields.only("swiglu_limit", 7.0)
    fields.only("swiglu_alpha", 1.702)
    fields.only("experts_per_token", fields.get("num_experts_per_tok"))
    attention = replace(read_heads(fields, kv_heads=8, head_dim=64), sinks=True)
    if not fields.get("rope_parameters"):
        fields.need("rope_scaling")
    rope = read_rope(fields, attention.head_dim, theta=_DEFAULT_THETA)
    fields.only("initial_context_length", rope.original_max_position)
    experts = read_experts(fields, width=fields.integer("intermediate_size"), renormalise=True, dense_layers=())
    assert experts is not None, "no layer is dense"
    bias = fields.flag("attention_bias", True)
    layers = range(fields.num_layers())
    return read_decoder(
        fields,
        architecture,
        layers=read_layers(
            fields,
            attention,
            [FULL if layer % 2 else SLIDING for layer in layers],
            {FULL: rope, SLIDING: rope},
            window=optional_integer(fields, "sliding_window", _DEFAULT_WINDOW_TOKENS),
        ),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        qkv_bias=bias,
        o_bias=bias,
        experts=replace(experts, activation="clamped_swish", bias=True),
    )


_EXPERTS = "mlp.experts"
_NAMES = TensorNames(
    sinks="self_attn.sinks",
    experts=ExpertNames(
        router="mlp.router",
        gate=f"{_EXPERTS}.{{}}.gate_proj",
        up=f"{_EXPERTS}.{{}}.up_proj",
        down=f"{_EXPERTS}.{{}}.down_proj",
        stacked=StackedExpertNames(gate_up=f"{_EXPERTS}.gate_up_proj", down=f"{_EXPERTS}.down_proj"),
    ),
)
FAMILIES = (ModelFamily(architectures=("GptOssForCausalLM",), read=read_gpt_oss, names=_NAMES),)
