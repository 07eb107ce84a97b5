"""Interface of edits to the logits of the requests that ask for them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.rows import SampledRows


class LogitEdit(Protocol):
    """One change to requests' logits before a token is chosen: a penalty, a bias, a mask.

    An edit keeps its own state of the seats that use it. No method makes the host wait for a GPU.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of `SequenceParams`: a request uses the edit if one of them is not the default.

        The edit is never called for seats of other requests.
        """
        ...

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        """Seat a request that uses the edit. known: its token ids so far [k] int32, on the device."""
        ...

    def release(self, seat: int) -> None:
        """Forget a seat that used the edit."""
        ...

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """Change the logits ([n, V] float32, contiguous) of the rows `using` in place."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """Edit that counts the sampled tokens. Which tokens of a row with drafts count is known later."""

    def sampled(self, tokens: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """Count the tokens [n] int64 that were chosen for the rows `using`; negative = none was chosen."""
        ...

    def output(self, seat: int, token_ids: Sequence[int]) -> None:
        """Count the tokens that came of a row with drafts."""
        ...


@runtime_checkable
class AppliesAfterMasks(Protocol):
    """Edit that applies after the masks of guides, except to rows that would have no token left."""

    def apply_if_possible(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """Apply the edit except to such rows."""
        ...


def flat_index(logits: torch.Tensor, rows: list[int], ids: list[torch.Tensor]) -> torch.Tensor:
    """Return indices into the flattened logits [n * V] of the token ids `ids[i]` of row `rows[i]`, in
    one list [sum].
    """
    layout = upload((rows, [len(t) for t in ids]), torch.int64, logits.device)
    offsets = torch.repeat_interleave(layout[0] * logits.shape[1], layout[1], output_size=sum(map(len, ids)))
    return offsets + torch.cat(ids)
