"""logit_bias: a number added to the logits of some tokens."""

from dataclasses import dataclass

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.edits.base import flat_index
from roseinfer.runner.rows import SampledRows


@dataclass(frozen=True, slots=True)
class _Bias:
    """Biases of a seat. ids: [b] int64, values: [b] float32, on the device."""

    ids: torch.Tensor
    values: torch.Tensor


class LogitBias:
    fields = ("logit_bias",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[int, _Bias] = {}  # by seat

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        ids, values = zip(*admission.params.logit_bias, strict=True)
        device = self._device
        self._of[admission.seat] = _Bias(upload(ids, torch.int64, device), upload(values, torch.float32, device))

    def release(self, seat: int) -> None:
        self._of.pop(seat, None)

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        biases = [self._of[rows.seats[i]] for i in using]
        where = flat_index(logits, using, [bias.ids for bias in biases])
        logits.view(-1).index_add_(0, where, torch.cat([bias.values for bias in biases]))
