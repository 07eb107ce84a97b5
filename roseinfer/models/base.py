"""Interface between the runner and a model."""

from typing import Protocol

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.base import WeightSource
from roseinfer.state.spec import StateSpec


class CausalLM(Protocol):
    """Decoder-only language model. It is built from a spec without memory; `load` gives it weights."""

    spec: ModelSpec
    attention: tuple[AttentionSpec, ...]
    """Attention of each layer that has one, restricted to the heads that this process holds."""
    device: torch.device
    dtype: torch.dtype
    weights: str
    """Format of the linear layers' weights, for people to read."""
    ignored: tuple[str, ...]
    """Patterns of checkpoint tensors that no layer needs."""

    @property
    def kv_scales(self) -> tuple[KVScales | None, ...]:
        """Scales of K and V in FP8 for each layer with attention; None where the loaded checkpoint has none."""
        ...

    @property
    def padded_vocab(self) -> int:
        """Columns of the product that makes logits: at least the vocabulary."""
        ...

    def state_specs(self, row_drafts: int = 0) -> tuple[StateSpec, ...]:
        """Return what each layer without attention keeps for a sequence, restricted to this process's part.

        row_drafts: most drafts of a row.
        """
        ...

    def load(self, source: WeightSource) -> None:
        """Load all weights. Raise `UnsupportedModelError` naming a tensor that is missing or misshaped."""
        ...

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Return the residual stream [T, hidden] after the last layer. Call `attention.begin(batch, store)` before.

        A model with `state_specs` needs `batch.states`, whose slots it updates.
        """
        ...

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to `hidden` [L, hidden] of `forward`."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the final norm and the head to `hidden` [L, hidden] of `forward`; L may be 0.

        Return [L, vocab] in the model's dtype. If `out` [L, padded_vocab] is given, the result is its first columns.
        """
        ...
