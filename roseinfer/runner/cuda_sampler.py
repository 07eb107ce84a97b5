"""Sampling on a GPU: a few kernels over all rows of a step, and uploads of masks."""

import torch

from roseinfer.core.plan import TokenMasks
from roseinfer.kernels.sampling.argmax import greedy
from roseinfer.kernels.sampling.draw import draw
from roseinfer.kernels.sampling.mask import mask_logits
from roseinfer.runner.device import aligned, upload
from roseinfer.runner.masks import RowMasks, masked_samples
from roseinfer.runner.seats import Feature, SeatTable

# While the host writes one buffer, the device may still read the masks of the step before.
_BUFFER_COUNT = 3


class CudaTokenChooser:
    """Greedy and random choice of tokens for the seats of one table.

    A row's token depends only on its seed, position and logits. pool: gets the tokens; by default the table's.
    """

    def __init__(self, seats: SeatTable, pool: torch.Tensor | None = None) -> None:
        self._seats = seats
        self._pool = seats.tokens if pool is None else pool

    def choose(self, logits: torch.Tensor, seats: torch.Tensor, ends: torch.Tensor, features: int) -> torch.Tensor:
        """Choose tokens as `Sampler._choose`. logits: [n, V]; seats, ends: [n] integers; features: union
        over all rows.
        """
        table = self._seats
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if not features & Feature.RANDOM:
            greedy(logits, seats, ends, self._pool, tokens)
            return tokens
        filtered = bool(features & Feature.FILTERED)
        draw(logits, seats, ends, table.settings, table.integers, self._pool, tokens, filtered=filtered)
        return tokens


class CudaMasks:
    """Pinned buffers that the host fills, and their copies on the device, over a separate stream.

    A buffer holds the rows of its masks, then their words.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._line = TokenMasks.words_per_row(vocab_size)
        self._head = aligned(max_rows)
        size = self._head + max_rows * self._line
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_BUFFER_COUNT)]
        self._arrays = [buffer.numpy() for buffer in self._pinned]
        self._on_device = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(_BUFFER_COUNT)]
        self._copied = [torch.cuda.Event() for _ in range(_BUFFER_COUNT)]
        self._copies = torch.cuda.Stream(device)
        self._turn = 0

    def take(self, lines: int) -> memoryview:
        """Return the next buffer's words, once the device has copied its old contents. See `Runner.mask_space`."""
        self._turn = (self._turn + 1) % _BUFFER_COUNT
        self._copied[self._turn].synchronize()
        words = self._arrays[self._turn][self._head : self._head + lines * self._line]
        return memoryview(words.view("uint32"))  # type: ignore[arg-type]  # it is a buffer

    def place(self, masks: TokenMasks, sampling: list[int]) -> RowMasks | None:
        """Queue the copy of the buffer that `take` returned last. See `HostMasks.place`."""
        at = masked_samples(masks, sampling)
        if not at:
            return None
        host, device = self._pinned[self._turn], self._on_device[self._turn]
        self._arrays[self._turn][: len(at)] = at
        size = self._head + len(at) * self._line
        # The step that read the device buffer last has been collected: the host has seen its tokens.
        with torch.cuda.stream(self._copies):
            device[:size].copy_(host[:size], non_blocking=True)
            self._copied[self._turn].record()
        torch.cuda.current_stream().wait_event(self._copied[self._turn])
        words = device[self._head : size].view(len(at), self._line)
        return RowMasks(at, words.view(torch.uint8), device[: len(at)])


class MaskKernel:
    """Application of masks in one launch."""

    def apply(self, logits: torch.Tensor, masks: RowMasks) -> None:
        """Apply masks as `MaskTable.apply` does."""
        index = masks.index
        if index is None:
            index = upload(masks.at, torch.int32, logits.device)
        mask_logits(logits, index, masks.bits.view(torch.int32))
