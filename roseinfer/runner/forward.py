"""From the rows of a plan to hidden states or logits: the seam behind which a GPU does it in its own way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.observer import Span, unobserved
from roseinfer.models.base import CausalLM
from roseinfer.runner.inputs import Columns


class SampleAt(NamedTuple):
    """Where the tokens of the n sampling rows go, on the device: seats [n], and positions of the new tokens [n]."""

    seats: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Either the hidden states [L, d] of all positions that want logits, or the logits [n, V] of the n sampling rows.

    `sample_at` is there where the pass had it on the device anyway.
    """

    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    sample_at: SampleAt | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the device, and where its samples go if that is there, too."""

    batch: ForwardBatch
    sample_at: SampleAt | None = None


class ForwardPass(Protocol):
    def run(self, columns: Columns) -> Forwarded:
        """Launch the forward pass of these rows. Token pool and block tables are up to date."""
        ...

    def observe(self, span: Span) -> None:
        """From now on the phase `prepare` of each run is a span."""
        ...


class EagerForward:
    """Prepares the batch, then calls the model layer by layer."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, store: KVStore, prepare: Callable[[Columns], Prepared]
    ) -> None:
        self._model = model
        self._attention = attention
        self._store = store
        self._prepare = prepare
        self._span: Span = unobserved

    def observe(self, span: Span) -> None:
        self._span = span

    def run(self, columns: Columns) -> Forwarded:
        with self._span("prepare"):
            prepared = self._prepare(columns)
        batch = prepared.batch
        self._attention.begin(batch, self._store)
        hidden = self._model.forward(batch, self._attention)
        if sum(columns.logits) < hidden.shape[0]:
            hidden = hidden.index_select(0, batch.logits_at)
        return Forwarded(hidden=hidden, sample_at=prepared.sample_at)
