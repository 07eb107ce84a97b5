"""Random choice of one token per row from filtered logits, by inverting the cumulative distribution.

Weights are exp((logit - best) / temperature) in float32, so the likeliest token has weight 1; sums are float64. Filters
apply in the order min-p, top-k, top-p, each to what the previous one has left:

  min-p  keeps tokens of weight >= min_p (likelihood relative to the likeliest; Nguyen et al., arXiv 2407.01082),
  top-k  keeps the k likeliest,
  top-p  keeps tokens while the mass before them is < p of the mass left (nucleus sampling, Holtzman et al.,
         arXiv 1904.09751): the token that crosses p is kept.

Equally likely tokens are ranked by token id, so the kept set is the same on every device. The distribution over kept
tokens is inverted in the order of their ids. So draws by one random number from two similar distributions mostly agree,
as those of a model and of its draft head should.
"""

from dataclasses import dataclass, replace

import torch

# Candidates in a row without top-k: first the smaller number of likeliest tokens, then the larger, then the whole
# sorted vocabulary. With 50k tokens on one core these take 0.15 ms, 0.6 ms and 3 ms per row.
MIN_CANDIDATES = 256
MAX_CANDIDATES = 4096
# Tokens per block of the two-level search: weights are summed by block first.
BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Settings of n rows: [n] float64 each, `top_k` [n] int64 (0 = off).

    any_min_p: some row has min_p > 0. any_whole_mass: some row has top-p without top-k, so its share refers to the
    whole vocabulary's mass. candidates: numbers of likeliest tokens that top-k and top-p try in turn.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    any_min_p: bool
    any_whole_mass: bool
    candidates: tuple[int, ...]

    def take(self, index: torch.Tensor) -> "DrawSettings":
        names = ("temperature", "top_p", "min_p", "top_k")
        return replace(self, **{name: getattr(self, name).index_select(0, index) for name in names})


def draw_plain(logits: torch.Tensor, best: torch.Tensor, settings: DrawSettings, u: torch.Tensor) -> torch.Tensor:
    """Draw tokens [n] of rows without top-k and top-p.

    logits: [n, V]; best: [n], their maxima; u: [n] float64 in [0, 1). The search has two levels, block of tokens and
    token, so that no float64 copy of a vocabulary is made.
    """
    vocab_size = logits.shape[1]
    weights = _weights(logits, best, settings)
    total = _block_sums(weights).cumsum(-1)
    target = u * total[:, -1]
    block = _invert(total, target).clamp_max_(total.shape[1] - 1)
    before = torch.nn.functional.pad(total, (1, 0)).gather(1, block[:, None]).squeeze(1)
    first = block * BLOCK_TOKENS
    columns = first[:, None] + torch.arange(BLOCK_TOKENS, device=logits.device)
    inside = weights.gather(1, columns.clamp_max(vocab_size - 1)).masked_fill_(columns >= vocab_size, 0)
    inside = inside.cumsum(-1, dtype=torch.float64)
    # The block's sum was rounded in another order than this running sum, so stay below its end.
    end = torch.nextafter(inside[:, -1], torch.zeros_like(target))
    return (first + _invert(inside, torch.minimum(target - before, end))).clamp_max_(vocab_size - 1)


def draw_filtered(logits: torch.Tensor, best: torch.Tensor, settings: DrawSettings, u: torch.Tensor) -> torch.Tensor:
    """Draw tokens [n] of rows with top-k or top-p; arguments as for `draw_plain`.

    A CPU first ranks a few of the likeliest tokens, since sorting a whole vocabulary is slow. Rows whose kept tokens
    may reach beyond them try more. A GPU sorts every row, since finding the rows that need it would make the host wait.
    The result is the same.
    """
    mass = None
    if settings.any_whole_mass:
        mass = _block_sums(_weights(logits, best, settings)).cumsum(-1)[:, -1]
    widths = settings.candidates if logits.device.type == "cpu" else ()
    return _draw_ranked(logits, best, settings, u, mass, widths)


def _draw_ranked(
    logits: torch.Tensor,
    best: torch.Tensor,
    settings: DrawSettings,
    u: torch.Tensor,
    mass: torch.Tensor | None,
    widths: tuple[int, ...],
) -> torch.Tensor:
    if not widths or widths[0] >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return _keep(values, best, settings, mass).draw(ids, u)
    width = widths[0]
    values, ids = _rank_ties(*logits.topk(width, -1))
    kept = _keep(values, best, settings, mass)
    tokens = kept.draw(ids, u)
    # Candidates that tie with the last one may be missing, so the kept tokens must all beat it.
    last_kept = values.gather(1, kept.count[:, None] - 1).squeeze(1)
    settled = (last_kept > values[:, -1]) & (settings.top_k < width)
    rest = torch.nonzero(~settled).squeeze(1)
    if len(rest):
        some = (logits[rest], best[rest], settings.take(rest), u[rest], None if mass is None else mass[rest])
        tokens[rest] = _draw_ranked(*some, widths[1:])
    return tokens


@dataclass(frozen=True, slots=True)
class _Kept:
    """Kept tokens: the first `count` [n] of the ranked ones, whose weights are `weights` [n, K] float32."""

    count: torch.Tensor
    weights: torch.Tensor

    def draw(self, ids: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Return the token [n] drawn by u. ids: those of the ranked tokens [n, K]."""
        weights = self.weights
        if ids.device.type == "cpu":  # few tokens are kept, and sorting is slow
            most = int(self.count.max())
            ids, weights = ids[:, :most], weights[:, :most]
        ranks = torch.arange(ids.shape[1], device=ids.device)
        ids, order = ids.masked_fill(ranks >= self.count[:, None], torch.iinfo(ids.dtype).max).sort(-1)
        total = weights.gather(1, order).cumsum(-1, dtype=torch.float64)
        last = self.count - 1
        place = _invert(total, u * total.gather(1, last[:, None]).squeeze(1))
        return ids.gather(1, torch.minimum(place, last)[:, None]).squeeze(1)


def _keep(values: torch.Tensor, best: torch.Tensor, settings: DrawSettings, mass: torch.Tensor | None) -> _Kept:
    """Filter ranked logits `values` [n, K]. mass: [n] weight of the whole row after min-p, None if all have top-k."""
    width = values.shape[1]
    weights = _weights(values, best, settings)
    top_k = settings.top_k[:, None]
    weights.masked_fill_((top_k > 0) & (torch.arange(width, device=values.device) >= top_k), 0)
    total = weights.cumsum(-1, dtype=torch.float64)
    mass = total[:, -1] if mass is None else torch.where(settings.top_k > 0, total[:, -1], mass)
    before = torch.nn.functional.pad(total[:, :-1], (1, 0))
    count = ((before < (settings.top_p * mass)[:, None]) & (weights > 0)).sum(-1)
    return _Kept(count.clamp_min_(1), weights)


def _weights(logits: torch.Tensor, best: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Return weights [n, K] float32, 0 for tokens that min-p drops."""
    weights = logits - best[:, None]
    weights.div_(settings.temperature.to(torch.float32)[:, None]).exp_()
    if settings.any_min_p:
        weights.masked_fill_(weights < settings.min_p.to(torch.float32)[:, None], 0)
    return weights


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sum blocks of `BLOCK_TOKENS` neighbours, [n, ceil(V / BLOCK_TOKENS)] float64, in the same order in
    every batch.
    """
    vocab_size = weights.shape[1]
    blocks = vocab_size // BLOCK_TOKENS
    sums = weights[:, : blocks * BLOCK_TOKENS].unflatten(1, (blocks, BLOCK_TOKENS)).sum(-1, dtype=torch.float64)
    if blocks * BLOCK_TOKENS == vocab_size:
        return sums
    rest = weights[:, blocks * BLOCK_TOKENS :].sum(-1, keepdim=True, dtype=torch.float64)
    return torch.cat((sums, rest), -1)


def _invert(total: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first position [n] whose running total [n, K] exceeds the target [n]. It never has weight 0."""
    return torch.searchsorted(total, target[:, None], right=True).squeeze(1)


def _rank_ties(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank candidates [n, K] of equal value by id; topk guarantees no order."""
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return values, ids
    order = ids.argsort(dim=-1)
    values, by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order).gather(1, by_value)
