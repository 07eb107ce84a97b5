"""min_tokens: tokens that end a request are banned until it has this many outputs."""

from dataclasses import dataclass

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.edits.base import flat_index
from roseinfer.runner.rows import SampledRows


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Minimum of a seat. stop_ids: [s] int64 on the device. end: first position that may hold one of them."""

    stop_ids: torch.Tensor
    end: int


class MinTokens:
    fields = ("min_tokens",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._of: dict[int, _Minimum] = {}  # by seat

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        # A model's EOS ids may include tokens outside its vocabulary.
        in_vocab = [token for token in admission.stop_ids if token < self._vocab_size]
        end = admission.prompt_len + admission.params.min_tokens
        self._of[admission.seat] = _Minimum(upload(in_vocab, torch.int64, self._device), end)

    def release(self, seat: int) -> None:
        self._of.pop(seat, None)

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        short = self._short(rows, using)
        if short:
            where = flat_index(logits, short, self._stop_ids(rows, short))
            logits.view(-1).index_fill_(0, where, -torch.inf)

    def apply_if_possible(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """Ban stop tokens unless nothing else is left: such an output ends early."""
        short = self._short(rows, using)
        if not short:
            return
        stop_ids, flat = self._stop_ids(rows, short), logits.view(-1)
        where = flat_index(logits, short, stop_ids)
        before = flat.index_select(0, where)
        flat.index_fill_(0, where, -torch.inf)
        layout = upload((short, [len(ids) for ids in stop_ids]), torch.int64, logits.device)
        nothing_left = logits.index_select(0, layout[0]).amax(-1) == -torch.inf
        gives_way = torch.repeat_interleave(nothing_left, layout[1], output_size=len(where))
        flat.index_copy_(0, where, torch.where(gives_way, before, -torch.inf))

    def _short(self, rows: SampledRows, using: list[int]) -> list[int]:
        """Return the rows that must not end yet."""
        return [i for i in using if rows.ends[i] < self._of[rows.seats[i]].end]

    def _stop_ids(self, rows: SampledRows, short: list[int]) -> list[torch.Tensor]:
        return [self._of[rows.seats[i]].stop_ids for i in short]
