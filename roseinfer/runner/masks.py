"""Masks of a step's rows: what their guides do not allow gets the logit -inf."""

from dataclasses import dataclass

import torch

from roseinfer.core.plan import TokenMasks
from roseinfer.runner.device import upload
from roseinfer.runner.rows import in_parts


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of the rows `at` of those that sample.

    bits: [m, B] uint8 on the device; bit v % 8 of byte v // 8 says whether token v is allowed, B >= ceil(V / 8).
    """

    at: list[int]
    bits: torch.Tensor

    @classmethod
    def of(cls, masks: TokenMasks, sampling: list[int], device: torch.device) -> "RowMasks | None":
        """What the host made for a plan. `sampling`: the plan's rows that sample, as the sampler numbers them.

        The bytes of a little-endian integer hold its bits in order. They go up without waiting, as in `upload`.
        """
        if not masks.rows:
            return None
        place = {row: at for at, row in enumerate(sampling)}
        bits = torch.frombuffer(masks.words, dtype=torch.uint8).view(len(masks.rows), -1)
        if device.type == "cuda":
            bits = bits.pin_memory().to(device, non_blocking=True)
        return cls([place[row] for row in masks.rows], bits)


class MaskSpace:
    """Memory that the host writes masks to."""

    def __init__(self, vocab_size: int) -> None:
        self._words = TokenMasks.words_per_line(vocab_size)

    def take(self, lines: int) -> memoryview:
        """Unsigned 32-bit integers, `lines` lines of them."""
        space = torch.empty(lines * self._words, dtype=torch.uint32)
        return memoryview(space.numpy())  # type: ignore[arg-type]  # it is a buffer


class MaskTable:
    """What to add to the logits of eight tokens, for every byte of a mask: 0 where a bit is set, -inf where not.

    On one core of an EPYC, 16 rows of 151,936 logits: 104 us a row, where taking the bits apart with shifts and filling
    with -inf takes 1.2 ms.
    """

    def __init__(self, device: torch.device) -> None:
        byte = torch.arange(256, device=device)[:, None]
        allowed = (byte >> torch.arange(8, device=device)) & 1
        self._table = torch.where(allowed.bool(), 0.0, -torch.inf)  # [256, 8] float32
        self._of: dict[torch.dtype, torch.Tensor] = {}

    def apply(self, logits: torch.Tensor, masks: RowMasks) -> None:
        """Mask the logits [n, V] in place, whatever their dtype and layout. A row that is not finite stays so."""
        table = self._of.setdefault(logits.dtype, self._table.to(logits.dtype))
        for part in in_parts(list(range(len(masks.at))), logits):
            bits = masks.bits[part[0] : part[-1] + 1]
            added = table.index_select(0, bits.reshape(-1).int()).view(len(part), -1)[:, : logits.shape[1]]
            at = upload([masks.at[i] for i in part], torch.int64, logits.device)
            logits.index_add_(0, at, added)
