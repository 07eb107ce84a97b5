"""Choice of a layer's implementation by its device."""

from roseinfer.kernels.common.availability import has_triton
from roseinfer.state.delta_spec import DeltaSpec
from roseinfer.state.gated_delta import DeltaLayer, DeltaWeights, TorchDelta


def make_delta(spec: DeltaSpec, weights: DeltaWeights) -> DeltaLayer:
    """Return the layer with its weights. Raise `ConfigError` for heads that a GPU's kernels do not support."""
    if not has_triton(weights.conv.device):
        return TorchDelta(spec, weights)
    from roseinfer.state.triton_delta import TritonDelta  # imports Triton, which only GPUs have

    return TritonDelta(spec, weights)
