"""Log probabilities of sampled tokens and of prompt tokens, with their ranks and the likeliest alternatives."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from roseinfer.core.plan import TokenLogprobs
from roseinfer.runner.device import rows_at_once, start_download, upload

# The logits of a long chunk over a large vocabulary would take gigabytes.
MAX_SCORED_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The k likeliest tokens of the positions `at`: ids [m, k] int64, logprobs [m, k] float32, best first."""

    at: list[int]
    ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of n positions. tokens, ranks: [n] int64, logprobs: [n] float32."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    tops: list[TopTokens]

    def download(self) -> "Scores":
        """Queue the copies to the host; they are valid once the stream has reached them."""
        tops = [TopTokens(t.at, start_download(t.ids), start_download(t.logprobs)) for t in self.tops]
        return Scores(start_download(self.tokens), start_download(self.logprobs), start_download(self.ranks), tops)

    def to_python(self) -> list[TokenLogprobs]:
        """Return one entry per position. The tensors must be on the host."""
        top: list[tuple[tuple[int, float], ...]] = [()] * len(self.tokens)
        for group in self.tops:
            for at, ids, values in zip(group.at, group.ids.tolist(), group.logprobs.tolist(), strict=True):
                top[at] = tuple(zip(ids, values, strict=True))
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.ranks.tolist(), top)
        return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]


def score(logits: torch.Tensor, tokens: torch.Tensor, wanted: list[int]) -> list[Scores]:
    """Score token tokens[i] ([n] int64) under the distribution of logits[i] ([n, V] float32), in slices of the rows.

    The rank is 1 + the number of likelier tokens. `wanted[i]` alternatives are listed: 0 none, -1 the vocabulary.
    """
    size = rows_at_once(logits)
    slices = zip(logits.split(size), tokens.split(size), range(0, len(wanted), size), strict=True)
    return [_score(some.log_softmax(-1), chosen, wanted[at : at + size]) for some, chosen, at in slices]


def _score(logprobs: torch.Tensor, tokens: torch.Tensor, wanted: list[int]) -> Scores:
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    groups: dict[int, list[int]] = {}
    for at, count in enumerate(wanted):
        groups.setdefault(count, []).append(at)
    tops = [_top_tokens(logprobs, at, count) for count, at in groups.items() if count]
    return Scores(tokens, chosen.squeeze(1), ranks, tops)


def _top_tokens(logprobs: torch.Tensor, at: list[int], count: int) -> TopTokens:
    vocab_size = logprobs.shape[1]
    if len(at) < len(logprobs):
        logprobs = logprobs.index_select(0, upload(at, torch.int64, logprobs.device))
    values, ids = logprobs.topk(vocab_size if count < 0 else min(count, vocab_size), -1)
    return TopTokens(at, ids, values)


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
    slices = zip(hidden.split(MAX_SCORED_POSITIONS), tokens.long().split(MAX_SCORED_POSITIONS), strict=True)
    for some_hidden, some_tokens in slices:
        logits = logits_of(some_hidden).float()
        finite.append(torch.isfinite(logits.amax()))
        parts += score(logits, some_tokens, [wanted] * len(some_tokens))
    return PromptScores(row, parts, torch.stack(finite))
