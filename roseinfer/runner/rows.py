"""Rows of a step that sample, and subsets of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from roseinfer.core.plan import Row
from roseinfer.runner.device import rows_at_once, upload


class Samples(NamedTuple):
    """Tokens that a step samples: one for each row that does, and one more for each of its drafts.

    rows[i]: index of the row. seats[i], ends[i]: its seat, and the token's position. drafts_before: for the tokens of
    rows with drafts only, how many drafts come before the token.
    """

    rows: list[int]
    seats: list[int]
    ends: list[int]
    drafts_before: dict[int, int]

    def settled(self, plan_rows: Sequence[Row], tokens: list[int]) -> list[int]:
        """Return which of the sampled `tokens` count: those of which all drafts before were right."""
        settled: list[int] = []
        for at, row in enumerate(self.rows):
            before = self.drafts_before.get(at, 0)
            if not before or (settled[-1] == at - 1 and tokens[at - 1] == plan_rows[row].drafts[before - 1]):
                settled.append(at)
        return settled


@dataclass(frozen=True, slots=True)
class Subset:
    """Some rows of a step: their numbers, and the same on the device.

    index: [m] int64, None if they are all rows of the step, so that nothing is copied then.
    """

    rows: list[int]
    index: torch.Tensor | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if self.index is None:
            target.copy_(values)
        else:
            target.index_copy_(0, self.index, values)


class SampleAt(NamedTuple):
    """Places of a step's n `Samples` on the device: seats [n], and positions of the new tokens [n]."""

    seats: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The n tokens that a step samples; row i is line i of the logits. A row of the plan with drafts has several.

    seats[i]: seat of row i. ends[i]: position of its new token; the token pool holds all tokens before it, drafts
    included. seat_index, end_index: the same [n] on the device. features[i]: bits of `Feature` for row i. any_feature:
    union over all rows. drafts_before: as in `Samples`.
    """

    seats: list[int]
    ends: list[int]
    seat_index: torch.Tensor
    end_index: torch.Tensor
    features: list[int]
    any_feature: int
    drafts_before: Mapping[int, int] = field(default_factory=dict)

    def that_use(self, feature: int) -> list[int]:
        return [i for i, features in enumerate(self.features) if features & feature]

    def subset(self, rows: list[int]) -> Subset:
        if len(rows) == len(self.seats):
            return Subset(rows, None)
        return Subset(rows, upload(rows, torch.int64, self.seat_index.device))


def in_parts(rows: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    """Yield the rows in slices of the size to process at once; logits: [n, V]."""
    size = rows_at_once(logits)
    return (rows[at : at + size] for at in range(0, len(rows), size))
