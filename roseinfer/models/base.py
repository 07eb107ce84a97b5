"""What the runner knows of a model."""

from typing import Protocol

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.base import WeightSource


class CausalLM(Protocol):
    """A decoder-only language model. Built without memory from a spec; `load` gives it weights."""

    spec: ModelSpec
    attention: tuple[AttentionSpec, ...]
    """What the attention of each of its layers computes: of the heads that this process holds."""
    device: torch.device
    dtype: torch.dtype
    weights: str
    """What the weights of its linear layers are kept as, for people to read."""
    ignored: tuple[str, ...]
    """Patterns of checkpoint tensors that no layer needs."""

    @property
    def kv_scales(self) -> tuple[KVScales | None, ...]:
        """Of each layer: what K and V in FP8 are multiplied by, None where the checkpoint, now loaded, brings none."""
        ...

    @property
    def padded_vocab(self) -> int:
        """Columns of the product that makes logits: at least the vocabulary."""
        ...

    def load(self, source: WeightSource) -> None:
        """Raises `UnsupportedModelError` naming a tensor that is missing or misshaped."""
        ...

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """The residual stream [T, hidden] after the last layer; `attention.begin(batch, store)` has been called."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The final norm and the head. hidden: [L, hidden] of `forward`, L may be 0.

        Returns [L, vocab] in the model's dtype, in the first columns of `out` [L, padded_vocab] if that is given.
        """
        ...
