"""Edits of logits that requests can ask for, one file each. Add a new one to the list in `make_edits`."""

import torch

from roseinfer.runner.edits.allowed import AllowedTokens
from roseinfer.runner.edits.banned import BannedSequences
from roseinfer.runner.edits.base import LogitEdit
from roseinfer.runner.edits.bias import LogitBias
from roseinfer.runner.edits.min_tokens import MinTokens
from roseinfer.runner.edits.penalties import Penalties


def make_edits(tokens: torch.Tensor, vocab_size: int) -> tuple[LogitEdit, ...]:
    """Return all edits in the order in which they apply. tokens: [S, C] int32, the token pool of `SeatTable`."""
    device = tokens.device
    return (
        Penalties(tokens, vocab_size),
        LogitBias(device),
        # Masks come last, so that excluded tokens stay excluded.
        AllowedTokens(device),
        BannedSequences(tokens),
        MinTokens(vocab_size, device),
    )
