"""Mixtral (Jiang et al., 2024): Mistral with experts in all layers."""

from roseinfer.models.decoder_config import optional_integer, read_decoder
from roseinfer.models.families.experts_config import read_experts
from roseinfer.models.families.family import STORED_FREQUENCIES, ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_one_window
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.expert_names import ExpertNames

_EXPERTS = "block_sparse_moe.experts.{}"


def read_mixtral(fields: ConfigFields, architecture: str) -> ModelSpec:
    # Their defaults differ from those of related models.
    fields.need("num_key_value_heads", "rms_norm_eps")
    if fields.get("rope_parameters") is None:
        fields.need("rope_theta")
    windows = read_one_window(fields, optional_integer(fields, "sliding_window", None), "Mixtral")
    experts = read_experts(fields, width=fields.integer("intermediate_size"), renormalise=True, dense_layers=())
    return read_decoder(fields, architecture, windows=windows, experts=experts)


_NAMES = TensorNames(
    experts=ExpertNames(
        router="block_sparse_moe.gate", gate=f"{_EXPERTS}.w1", up=f"{_EXPERTS}.w3", down=f"{_EXPERTS}.w2"
    )
)
FAMILIES = (
    ModelFamily(architectures=("MixtralForCausalLM",), read=read_mixtral, names=_NAMES, ignored=STORED_FREQUENCIES),
)
