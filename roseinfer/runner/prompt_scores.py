"""Log probabilities of prompt tokens: every position of a chunk scores the token that follows it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from roseinfer.core.plan import TokenLogprobs
from roseinfer.runner.device import start_download
from roseinfer.runner.logprobs import Scores, score

# The logits of a long chunk over a large vocabulary would take gigabytes.
POSITIONS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt tokens that follow the chunk's positions. `finite`: [parts] bool, per slice of the chunk."""

    row: int
    parts: list[Scores]
    finite: torch.Tensor

    def download(self) -> "PromptScores":
        return PromptScores(self.row, [part.download() for part in self.parts], start_download(self.finite))

    def to_python(self) -> tuple[TokenLogprobs, ...]:
        return tuple(entry for part in self.parts for entry in part.to_python())


def score_prompt(
    row: int, logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, tokens: torch.Tensor, wanted: int
) -> PromptScores:
    """Score tokens[i] ([n]) after position i ([n, d] hidden), some positions at a time."""
    parts, finite = [], []
    slices = zip(hidden.split(POSITIONS_AT_ONCE), tokens.long().split(POSITIONS_AT_ONCE), strict=True)
    for some_hidden, some_tokens in slices:
        logits = logits_of(some_hidden).float()
        finite.append(torch.isfinite(logits.amax()))
        parts += score(logits, some_tokens, [wanted] * len(some_tokens))
    return PromptScores(row, parts, torch.stack(finite))
