"""Reader of experts in config.json; without torch."""

from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ExpertsSpec


def read_experts(
    fields: ConfigFields,
    *,
    width: int,
    renormalise: bool,
    dense_layers: tuple[int, ...],
    shared_width: int | None = None,
) -> ExpertsSpec | None:
    """Return the experts of the model; None if all layers are dense."""
    older, newer = fields.get("num_experts"), fields.get("num_local_experts")
    if None not in (older, newer) and older != newer:
        fields.refuse("num_local_experts", newer, f"num_experts = {older}")
    count = fields.integer("num_experts" if newer is None else "num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > count:
        fields.refuse("num_experts_per_tok", top_k, f"there are {count} experts")
    if len(dense_layers) == fields.num_layers():
        return None
    return ExpertsSpec(
        count=count,
        top_k=top_k,
        width=width,
        renormalise=renormalise,
        dense_layers=dense_layers,
        shared_width=shared_width,
    )


def read_dense_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Return the layers without experts: those that are listed, and all but every `decoder_sparse_step`-th."""
    layers, step = fields.num_layers(), fields.integer("decoder_sparse_step", 1)
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in named):
        fields.refuse("mlp_only_layers", named, f"a list of numbers of the {layers} layers is needed")
    dense = set(named)
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
