"""min_tokens: what would end a request cannot be sampled before it has so many outputs."""

from dataclasses import dataclass

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.edits.base import flat_index
from roseinfer.runner.rows import SampledRows


@dataclass(frozen=True, slots=True)
class _Minimum:
    """stop_ids: [s] int64 on the device. `end`: the position of the first token that may be one of them."""

    stop_ids: torch.Tensor
    end: int


class MinTokens:
    fields = ("min_tokens",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._of: dict[int, _Minimum] = {}  # by seat

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        # A model's EOS ids may name tokens that its vocabulary does not have.
        in_vocab = [token for token in admission.stop_ids if token < self._vocab_size]
        end = admission.prompt_len + admission.params.min_tokens
        self._of[admission.seat] = _Minimum(upload(in_vocab, torch.int64, self._device), end)

    def release(self, seat: int) -> None:
        self._of.pop(seat, None)

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        short = [i for i in using if rows.ends[i] < self._of[rows.seats[i]].end]
        if short:
            where = flat_index(logits, short, [self._of[rows.seats[i]].stop_ids for i in short])
            logits.view(-1).index_fill_(0, where, -torch.inf)
