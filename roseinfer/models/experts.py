"""What config.json says of layers with experts, read without torch."""

from dataclasses import dataclass

from roseinfer.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Feed-forward layers of which a router chooses, for each token, `top_k` of `count` experts.

    width: of each expert's hidden layer. renormalise: whether the weights of the chosen, from a softmax over all
    experts, are divided by their sum. dense_layers: those that have one ordinary feed-forward network instead, in
    ascending order.
    """

    count: int
    top_k: int
    width: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()


def read_experts(fields: Fields, *, width: int, renormalise: bool, dense_layers: tuple[int, ...]) -> ExpertsSpec | None:
    """None if all layers are dense."""
    older, newer = fields.get("num_experts"), fields.get("num_local_experts")
    if None not in (older, newer) and older != newer:
        fields.refuse("num_local_experts", newer, f"num_experts = {older}")
    count = fields.integer("num_experts" if newer is None else "num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > count:
        fields.refuse("num_experts_per_tok", top_k, f"there are {count} experts")
    if len(dense_layers) == fields.integer("num_hidden_layers"):
        return None
    return ExpertsSpec(count=count, top_k=top_k, width=width, renormalise=renormalise, dense_layers=dense_layers)


def read_dense_layers(fields: Fields) -> tuple[int, ...]:
    """Layers without experts: those that are named, and all but every `decoder_sparse_step`-th."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in named):
        fields.refuse("mlp_only_layers", named, f"a list of numbers of the {layers} layers is needed")
    dense = set(named)
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
