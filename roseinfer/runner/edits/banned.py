"""bad_token_ids: sequences of tokens that an output cannot contain; their last token is banned after the others."""

from dataclasses import dataclass

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.edits.base import flat_index
from roseinfer.runner.rows import SampledRows


@dataclass(frozen=True, slots=True)
class _Banned:
    """The B banned sequences of a seat, on the device.

    last: [B] int64, their last tokens. The E other tokens of all sequences together: `token` [E] int64, `back` [E]
    int64 distance from the end (1 = directly before it), `of` [E] int64 index of their sequence.
    """

    last: torch.Tensor
    token: torch.Tensor
    back: torch.Tensor
    of: torch.Tensor


class BannedSequences:
    """Edit that compares with the token pool on the device, which has the newest tokens before the host does.

    Only outputs count: a sequence that begins in the prompt may be completed.
    """

    fields = ("bad_token_ids",)

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._of: dict[int, _Banned] = {}  # by seat
        self._prompt_len: dict[int, int] = {}

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        sequences = sorted(set(admission.params.bad_token_ids))
        before = [
            (token, back, number)
            for number, ids in enumerate(sequences)
            for back, token in enumerate(reversed(ids[:-1]), start=1)
        ]
        columns = upload(list(zip(*before, strict=True)) or [[], [], []], torch.int64, self._pool.device)
        last = upload([ids[-1] for ids in sequences], torch.int64, self._pool.device)
        self._of[admission.seat] = _Banned(last, *columns)
        self._prompt_len[admission.seat] = admission.prompt_len

    def release(self, seat: int) -> None:
        self._of.pop(seat, None)
        self._prompt_len.pop(seat, None)

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        banned = [self._of[rows.seats[i]] for i in using]
        last = [entry.last for entry in banned]
        differences = self._differences(rows, using, banned)
        # Add, since a token that ends several sequences may be excluded by one and not by another.
        effect = torch.zeros_like(differences).masked_fill_(differences == 0, -torch.inf)
        logits.view(-1).index_add_(0, flat_index(logits, using, last), effect)

    def _differences(self, rows: SampledRows, using: list[int], banned: list[_Banned]) -> torch.Tensor:
        """Count, for each sequence of each row, the tokens before its last that differ from the output's end [sum B].

        The result is float32, which can be summed without making a GPU wait.
        """
        device = self._pool.device
        counts = [len(entry.last) for entry in banned]
        lengths = [len(entry.token) for entry in banned]
        differences = torch.zeros(sum(counts), dtype=torch.float32, device=device)
        if not sum(lengths):
            return differences
        width = self._pool.shape[1]
        layout = upload(
            (
                [rows.seats[i] * width for i in using],
                [rows.ends[i] for i in using],
                [self._prompt_len[rows.seats[i]] for i in using],
                [sum(counts[:place]) for place in range(len(counts))],
                lengths,
            ),
            torch.int64,
            device,
        )
        line, end, prompt_len, first = torch.repeat_interleave(
            layout[:4], layout[4], dim=1, output_size=sum(lengths)
        ).unbind(0)
        position = end - torch.cat([entry.back for entry in banned])
        known = self._pool.view(-1).index_select(0, line + position.clamp_min(0))
        differs = (known != torch.cat([entry.token for entry in banned])) | (position < prompt_len)
        return differences.index_add_(0, first + torch.cat([entry.of for entry in banned]), differs.float())
