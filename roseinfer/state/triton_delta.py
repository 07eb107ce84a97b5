"""Gated DeltaNet by Triton kernels, which take everything about a step's rows from the device."""

import torch

from roseinfer.core.errors import ConfigError
from roseinfer.kernels.delta.chunks import delta_chunks
from roseinfer.kernels.delta.decode import delta_decode
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.state.batch import StateBatch
from roseinfer.state.delta_spec import GATES, MEMORY, WINDOW, DeltaSpec
from roseinfer.state.gated_delta import DeltaWeights, Projected

WIDTHS = (16, 32, 64, 128)


class TritonDelta:
    """`DeltaLayer` for GPUs: one launch for rows of one token and its drafts, and seven for others, if any."""

    def __init__(self, spec: DeltaSpec, weights: DeltaWeights) -> None:
        """Raise `ConfigError` for heads that the kernels do not support."""
        if spec.key_dim != spec.value_dim or spec.key_dim not in WIDTHS:
            found = f"{spec.key_dim} and {spec.value_dim}"
            raise ConfigError(f"linear attention on a GPU needs keys and values of {WIDTHS} numbers alike, not {found}")
        self._weights = weights

    def __call__(self, layer: int, projected: Projected, states: StateBatch) -> torch.Tensor:
        assert states.tables is not None, "kernels need the step's tables"
        weights = self._weights
        inputs = DeltaInputs(
            *projected,
            conv=weights.conv,
            decay=weights.decay,
            dt_bias=weights.dt_bias,
            norm=weights.norm,
            memory=states.store.part(layer, MEMORY),
            window=states.store.part(layer, WINDOW),
            kept=states.store.find(layer, GATES),
            rows=states.tables.rows,
            pieces=states.tables.pieces,
            eps=weights.eps,
        )
        z = projected.z
        # Tokens between the rows that a captured step has room for are computed by no kernel.
        make = torch.zeros if len(states.tables.pieces) else torch.empty
        out = make(z.shape, dtype=z.dtype, device=z.device)
        delta_decode(inputs, out)
        delta_chunks(inputs, out)
        return out
