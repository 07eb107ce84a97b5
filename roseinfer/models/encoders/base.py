"""Interface between the runner and an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.quant.base import Build, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Packed tokens of R whole rows, T tokens in all. Row r owns tokens query_start[r] .. query_start[r + 1].

    input_ids, positions: [T] int64; positions count from 0 in each row. query_start: [R + 1] int32. query_lens: lengths
    of the rows, at least 1, on the host. token_types: [T] int64, the segment of each token; None if all are 0.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    query_lens: list[int]
    token_types: torch.Tensor | None = None

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, query_lens: Sequence[int], token_types: torch.Tensor | None = None
    ) -> "PackedRows":
        """Return the rows of these lengths that `input_ids` [T] holds one after the other."""
        device = input_ids.device
        start = torch.tensor([0, *accumulate(query_lens)], device=device)
        lengths = start.diff()
        positions = torch.arange(len(input_ids), device=device)
        positions -= torch.repeat_interleave(start[:-1], lengths, output_size=len(input_ids))
        return cls(
            input_ids=input_ids,
            positions=positions,
            query_start=start.int(),
            query_lens=list(query_lens),
            token_types=token_types,
        )


class EncoderNetwork(Protocol):
    """Network of one family."""

    ignored: tuple[str, ...]
    """Patterns of checkpoint tensors that are not needed."""

    def load(self, source: WeightSource) -> None:
        """Load all weights. Raise `UnsupportedModelError` naming a tensor that is missing or misshaped."""
        ...

    def forward(self, rows: PackedRows) -> torch.Tensor:
        """Return the final hidden states [T, hidden] of the rows' tokens."""
        ...

    def scores(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the head's output [R, labels] for pooled rows [R, hidden]; both are float32."""
        ...


class EncoderModel:
    """Encoder with weights. Run it in `torch.inference_mode`."""

    def __init__(self, spec: EncoderSpec, build: Build, network: EncoderNetwork) -> None:
        self.spec, self.dtype, self.device = spec, build.dtype, build.device
        self.weights = build.weight_format.stored_as or str(build.dtype).removeprefix("torch.")
        self._network = network

    def forward(self, rows: PackedRows) -> torch.Tensor:
        """Return the final hidden states [T, hidden] of the rows' tokens, in the model's dtype.

        Each token sees its own row only.
        """
        return self._network.forward(rows)

    def scores(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the scores [R, labels] in float32, before their activation, for rows that are pooled as `spec.head`
        says, [R, hidden].
        """
        return self._network.scores(pooled.float())
