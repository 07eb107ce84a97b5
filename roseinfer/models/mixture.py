"""Relatives of Llama whose layers have experts: Qwen3-MoE and Mixtral. They differ in the names of the tensors."""

from roseinfer.layers.experts import RoutedExperts
from roseinfer.models.decoder import FeedForward
from roseinfer.models.llama import Llama
from roseinfer.quant.base import ExpertNames, ExpertShape


class Qwen3Mixture(Llama):
    """Family of `Qwen3MoeForCausalLM`. Some of its layers may be dense, like Qwen3's."""

    experts = ExpertNames(
        router="gate",
        gate="experts.{}.gate_proj",
        up="experts.{}.up_proj",
        down="experts.{}.down_proj",
    )

    def feed_forward(self, layer: int) -> FeedForward:
        spec = self.spec
        if spec.experts is None or layer in spec.experts.dense_layers:
            return super().feed_forward(layer)
        shape = ExpertShape(
            count=spec.experts.count,
            top_k=spec.experts.top_k,
            hidden=spec.hidden_size,
            width=spec.experts.width,
            renormalise=spec.experts.renormalise,
            activation=spec.activation,
        )
        return RoutedExperts(self.norm(), shape, self.experts)


class Mixtral(Qwen3Mixture):
    """Family of `MixtralForCausalLM`."""

    part = "block_sparse_moe"
    experts = ExpertNames(router="gate", gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")
