"""Rows of a step that sample, and subsets of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from roseinfer.runner.device import rows_at_once, upload


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
    """Places of the n sampling rows' tokens on the device: seats [n], and positions of the new tokens [n]."""

    seats: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The n rows of a step that sample; row i is line i of the logits.

    seats[i]: seat of row i. ends[i]: position of its new token; the token pool holds all tokens before it. seat_index,
    end_index: the same [n] on the device. features[i]: bits of `Feature` for row i. any_feature: union over all rows.
    """

    seats: list[int]
    ends: list[int]
    seat_index: torch.Tensor
    end_index: torch.Tensor
    features: list[int]
    any_feature: int

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
