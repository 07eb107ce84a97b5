"""Reader of experts in config.json; without torch."""

from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ExpertsSpec


def read_experts(
    fields: ConfigFields, *, width: int, renormalise: bool, dense_layers: tuple[int, ...]
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
    return ExpertsSpec(count=count, top_k=top_k, width=width, renormalise=renormalise, dense_layers=dense_layers)
