"""Token streams: windows to train on, and documents to score one by one."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SNAP_TOKENS = 512
NO_BOS_SHARE = 0.05


@dataclass(frozen=True)
class Stream:
    """Documents in a row. `tokens` [n]; `starts` [documents], where each one's END_OF_TEXT (id 0) stands."""

    tokens: Tensor
    starts: Tensor
    n_bytes: int

    def to(self, device: str) -> "Stream":
        return Stream(self.tokens.to(device), self.starts.to(device), self.n_bytes)


@dataclass(frozen=True)
class Scored:
    """A piece of a document: `tokens` to read; predictions of those after the first `context` + 1 count."""

    tokens: Tensor
    context: int


def load(path: Path) -> Stream:
    arrays = np.load(path)
    tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
    return Stream(tokens, torch.from_numpy(arrays["starts"]), int(arrays["n_bytes"]))


def shuffled(stream: Stream, generator: torch.Generator) -> Stream:
    """The same documents in random order."""
    device = stream.tokens.device
    ends = torch.cat([stream.starts[1:], torch.tensor([len(stream.tokens)], device=device)])
    order = torch.randperm(len(stream.starts), generator=generator).to(device)
    lengths = (ends - stream.starts)[order]
    starts = lengths.cumsum(0) - lengths
    index = torch.arange(len(stream.tokens), device=device)
    index += (stream.starts[order] - starts).repeat_interleave(lengths)
    return Stream(stream.tokens[index], starts, stream.n_bytes)


def epoch(stream: Stream, length: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches [batch, length + 1] that cover the stream about once.

    Windows lie on a grid with a random offset and begin at the next document's start where one is near, so
    that the model sees documents from position 0 on; a few begin just behind END_OF_TEXT, as prompts may.
    """
    last = len(stream.tokens) - length - 2
    offset = int(torch.randint(length, (1,), generator=generator))
    grid = torch.arange(offset, last, length)
    grid = grid[torch.randperm(len(grid), generator=generator)].to(stream.tokens.device)
    following = torch.searchsorted(stream.starts, grid).clamp(max=len(stream.starts) - 1)
    nearest = stream.starts[following]
    begins = torch.where((nearest - grid < SNAP_TOKENS) & (nearest <= last), nearest, grid)
    begins += (torch.rand(len(grid), generator=generator) < NO_BOS_SHARE).to(begins)
    steps = torch.arange(length + 1, device=begins.device)
    for chosen in begins.split(batch):
        if len(chosen) == batch:
            yield stream.tokens[chosen[:, None] + steps]


def batches(stream: Stream, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Epochs without end: every other one keeps the order of the modules, the rest mix all documents."""
    generator = torch.Generator().manual_seed(seed)
    number = 0
    while True:
        chosen = stream if number % 2 else shuffled(stream, generator)
        yield from epoch(chosen, length, batch, generator)
        number += 1


def pieces(ids: Tensor, length: int) -> Iterator[Scored]:
    """A document's ids (END_OF_TEXT at both ends) in pieces of at most `length` predictions.

    Every token but the first is predicted exactly once; pieces after the first see length // 2 earlier ones.
    """
    yield Scored(ids[: length + 1], 0)
    stride = length // 2
    for done in range(length, len(ids) - 1, stride):
        yield Scored(ids[done - stride : done + stride + 1], stride)


def documents(stream: Stream, length: int) -> list[Scored]:
    """All documents' pieces, each document scored by itself and with the END_OF_TEXT that ends it."""
    bounds = [*stream.starts.tolist(), len(stream.tokens)]
    end = stream.tokens.new_zeros(1)
    result: list[Scored] = []
    for begin, stop in itertools.pairwise(bounds):
        result += pieces(torch.cat([stream.tokens[begin:stop], end]), length)
    return result


def padded_batches(scored: list[Scored], batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, mask), each [batch, longest]; the mask marks the tokens whose prediction counts."""
    ordered = sorted(scored, key=lambda piece: len(piece.tokens))
    for first in range(0, len(ordered), batch):
        group = ordered[first : first + batch]
        longest = len(group[-1].tokens)
        tokens = group[0].tokens.new_zeros(len(group), longest)
        mask = torch.zeros(len(group), longest, dtype=torch.bool, device=tokens.device)
        for row, piece in enumerate(group):
            tokens[row, : len(piece.tokens)] = piece.tokens
            mask[row, piece.context + 1 : len(piece.tokens)] = True
        yield tokens, mask
