"""Adapters of the rows of one step, which all layers read."""

from dataclasses import dataclass

import torch

from roseinfer.quant.base import AdapterRows


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Tokens of a step that share an adapter. index: [n] int64, None for all tokens."""

    slot: int
    index: torch.Tensor | None


class StepAdapters:
    """Adapters of the current step. `rows`: None if no row has one."""

    rows: AdapterRows | None = None

    def __init__(self) -> None:
        self._groups: list[RowGroup] | None = None

    def begin(self, rows: AdapterRows | None) -> None:
        self.rows = rows
        self._groups = None

    @property
    def groups(self) -> list[RowGroup]:
        """Tokens by adapter, without those of the model itself."""
        if self.rows is None:
            return []
        if self._groups is None:
            found, of_tokens = sorted(set(self.rows.slots)), self.rows.of_tokens
            if len(found) == 1:
                self._groups = [RowGroup(found[0], None)]
            else:
                self._groups = [RowGroup(slot, (of_tokens == slot).nonzero().squeeze(1)) for slot in found if slot >= 0]
        return self._groups
