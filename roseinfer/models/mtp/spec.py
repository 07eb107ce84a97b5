"""Shape of a multi-token prediction head, as its model has it; without torch."""

from dataclasses import dataclass, replace

from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.families import family_of
from roseinfer.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec:
    """Head for one model. layer: a layer of the model with attention. boundaries: as in `EagleSpec`."""

    layer: LayerSpec
    hidden_size: int
    boundaries: tuple[int, ...]

    @property
    def attention(self) -> AttentionSpec:
        assert self.layer.attention is not None, "a head's layer has attention"
        return self.layer.attention

    def after(self, target: ModelSpec) -> ModelSpec:
        """Return a spec whose layers are the target's, then the head's. Their numbers are those of the KV store."""
        return replace(target, layers=(*target.layers, self.layer))


def mtp_spec_of(target: ModelSpec) -> MtpSpec:
    """Return the spec of a model's head. Raise `UnsupportedModelError` for architectures without one."""
    family = family_of(target.architecture)
    if family is None or not family.has_mtp:
        raise UnsupportedModelError(
            f"speculation 'mtp' is not supported by {target.architecture}, which has no multi-token prediction head"
        )
    layer = next(layer for layer in target.layers if layer.attention is not None)
    assert layer.attention is not None
    layer = replace(layer, attention=replace(layer.attention, skips_first=True))
    return MtpSpec(layer=layer, hidden_size=target.hidden_size, boundaries=(target.num_layers,))
