"""The rows of a step that sample, and parts of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from roseinfer.runner.device import rows_at_once, upload


@dataclass(frozen=True, slots=True)
class Subset:
    """Some rows of a step: their numbers, and the same on the device.

    `index` [m] int64 is None if they are all rows of the step, so that nothing is copied then.
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
    """Where the tokens of the n sampling rows go, on the device: seats [n], and positions of the new tokens [n]."""

    seats: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The n rows of a step that sample, row i being line i of the logits.

    seats[i] is the seat of row i and ends[i] the position of its new token, before which all its tokens are known to
    the token pool; `seat_index` and `end_index` [n] are the same on the device. features[i]: bits of `Feature`, what
    row i needs; `any_feature`: what some row needs.
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
    """The rows a slice at a time, as many as to work on at once; logits: [n, V]."""
    size = rows_at_once(logits)
    return (rows[at : at + size] for at in range(0, len(rows), size))
