"""Model with a draft head, which looks like one model whose last layer is the head's."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.eagle.head import HeadTarget
from roseinfer.models.step import StepContext
from roseinfer.quant.base import WeightSource
from roseinfer.state.spec import StateSpec


class StatefulTarget(HeadTarget, Protocol):
    """Model whose forward pass can return the residual streams entering some layers."""

    def forward_with_states(
        self, batch: ForwardBatch, attention: AttentionBackend, boundaries: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class HeadShape(Protocol):
    """Sizes of a draft head. boundaries: as in `EagleSpec`."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def boundaries(self) -> tuple[int, ...]: ...


class DraftHead(Protocol):
    """Layer that guesses next tokens from states of a model. Methods are as in `EagleHead`."""

    target_ids: torch.Tensor

    @property
    def spec(self) -> HeadShape: ...

    @property
    def attention(self) -> AttentionSpec: ...

    def fuse(self, streams: torch.Tensor) -> torch.Tensor: ...

    def write(self, ids: torch.Tensor, states: torch.Tensor, step: StepContext) -> None: ...

    def forward(self, ids: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor: ...

    def logits(self, x: torch.Tensor) -> torch.Tensor: ...

    def next_states(self, x: torch.Tensor) -> torch.Tensor: ...


class DraftingModel:
    """`CausalLM` that also keeps its head's KV layer as full as its own layers.

    The head's entry of a row's first token needs the state of the token before, so the last state of each seat is kept:
    `take_seats` makes room. states: those of the last forward pass [T, hidden], in the batch's order, and older ones.
    last: the last state of each seat [S, hidden].
    """

    states: torch.Tensor
    last: torch.Tensor

    def __init__(self, target: StatefulTarget, head: DraftHead) -> None:
        self.head = head
        self._target = target
        self.spec, self.dtype, self.device = target.spec, target.dtype, target.device
        self.weights, self.ignored = target.weights, target.ignored
        self.attention = (*target.attention, head.attention)

    @property
    def kv_scales(self) -> tuple[KVScales | None, ...]:
        return (*self._target.kv_scales, None)

    @property
    def padded_vocab(self) -> int:
        return self._target.padded_vocab

    def state_specs(self, row_drafts: int = 0) -> tuple[StateSpec, ...]:
        return self._target.state_specs(row_drafts)

    def load(self, source: WeightSource) -> None:
        """Load the target's weights. The head is given with weights."""
        self._target.load(source)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._target.normed(hidden)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._target.logits(hidden, out)

    # --- states of seats ----------------------------------------------------------------------------------------
    def take_seats(self, count: int, max_tokens: int) -> None:
        """Make room for the last states of `count` seats, and for the states of a step of `max_tokens` tokens."""
        hidden = self.head.spec.hidden_size
        self.last = torch.zeros((count, hidden), dtype=self.dtype, device=self.device)
        self.states = torch.zeros((max_tokens, hidden), dtype=self.dtype, device=self.device)

    def admit(self, seats: torch.Tensor) -> None:
        """Forget the states of earlier requests in these seats [n] int64: they may be infinite or NaN."""
        self.last.index_fill_(0, seats, 0)

    def end_at(self, seats: torch.Tensor, states: torch.Tensor) -> None:
        """Set the last states [n, hidden] of seats [n] int64, in which the last forward pass computed wrong drafts."""
        self.last.index_copy_(0, seats, states)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x, streams = self._target.forward_with_states(batch, attention, self.head.spec.boundaries)
        states = self.head.fuse(streams)
        seats, starts = batch.table_rows.long(), batch.query_start.long()
        # One place more: rows that only pad a captured step begin after its tokens.
        before = F.pad(states, (0, 0, 1, 0))
        before.index_copy_(0, starts[:-1], self.last.index_select(0, seats))
        self.head.write(batch.input_ids, before[:-1], StepContext(batch, attention))
        self.end_at(seats, states.index_select(0, (starts[1:] - 1).clamp_min(0)))
        self.states[: len(states)] = states
        return x
