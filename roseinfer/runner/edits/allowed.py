"""allowed_token_ids: only these tokens can be sampled."""

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.edits.base import flat_index
from roseinfer.runner.rows import SampledRows


class AllowedTokens:
    fields = ("allowed_token_ids",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[int, torch.Tensor] = {}  # seat -> ids [a] int64 on the device, each once

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        ids = sorted(set(admission.params.allowed_token_ids or ()))
        self._of[admission.seat] = upload(ids, torch.int64, self._device)

    def release(self, seat: int) -> None:
        self._of.pop(seat, None)

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """Save the allowed logits, fill the rows with -inf, and restore them. This needs no mask of a vocabulary."""
        where = flat_index(logits, using, [self._of[rows.seats[i]] for i in using])
        flat = logits.view(-1)
        kept = flat.index_select(0, where)
        index = rows.subset(using).index
        if index is None:
            logits.fill_(-torch.inf)
        else:
            logits.index_fill_(0, index, -torch.inf)
        flat.index_copy_(0, where, kept)
