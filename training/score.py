"""Bits per byte of documents that are scored one by one."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from training import data

BATCH = 32


def bits_per_byte(logits_of: Callable[[Tensor], Tensor], stream: data.Stream, length: int) -> float:
    """Every document by itself, after a BOS; the cost of ending each is included.

    `logits_of` maps tokens [batch, n] to logits [batch, n, vocabulary]; `length` is the most it is given at once.
    """
    nats = 0.0
    with torch.inference_mode():
        for tokens, mask in data.padded_batches(data.documents(stream, length), BATCH):
            logits = logits_of(tokens[:, :-1]).float()
            losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            nats += losses[mask[:, 1:].flatten()].sum().item()
    return nats / math.log(2) / stream.n_bytes
