"""What it takes to change the logits of the requests that ask for it."""

from typing import Protocol, runtime_checkable

import torch

from roseinfer.core.plan import Admission
from roseinfer.runner.device import upload
from roseinfer.runner.rows import SampledRows


class LogitEdit(Protocol):
    """One thing that requests can have done to their logits before a token is chosen: a penalty, a bias, a mask.

    An edit keeps what it needs of the seats that use it. None of its methods makes the host wait for a GPU.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of `SamplingParams`: a request whose value of one is not the default uses the edit.

        For the seats of other requests nothing is called.
        """
        ...

    def admit(self, admission: Admission, known: torch.Tensor) -> None:
        """A request that uses the edit takes a seat. known: its token ids so far [k] int32, on the device."""
        ...

    def release(self, seat: int) -> None:
        """Forget a seat that used the edit."""
        ...

    def apply(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """Change the logits ([n, V] float32, contiguous) of the rows `using` in place."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """An edit that keeps account of what is sampled."""

    def sampled(self, tokens: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """The tokens [n] int64 that were chosen, of which it notes those of the rows `using`; negative = none was."""
        ...


@runtime_checkable
class AppliesAfterMasks(Protocol):
    """An edit that comes behind the masks of guides and does nothing to a row of which it would leave no token."""

    def apply_if_possible(self, logits: torch.Tensor, rows: SampledRows, using: list[int]) -> None:
        """As `LogitEdit.apply`, but for such rows."""
        ...


def flat_index(logits: torch.Tensor, rows: list[int], ids: list[torch.Tensor]) -> torch.Tensor:
    """Indices into the flattened logits [n * V] of the token ids `ids[i]` of row `rows[i]`, in one list [sum]."""
    layout = upload((rows, [len(t) for t in ids]), torch.int64, logits.device)
    offsets = torch.repeat_interleave(layout[0] * logits.shape[1], layout[1], output_size=sum(map(len, ids)))
    return offsets + torch.cat(ids)
