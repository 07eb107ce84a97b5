"""Sampler of the next token of all rows at once; only rows that use a feature pay for it.

Log probabilities come from the raw logits. Then edits apply (see `edits.make_edits`), then the masks of guides, then
min_tokens. The token is the likeliest, or a draw at the request's temperature through its filters (see `draw`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.common.availability import has_triton
from roseinfer.runner.device import upload
from roseinfer.runner.draw import (
    BLOCK_TOKENS,
    MAX_CANDIDATES,
    MIN_CANDIDATES,
    DrawSettings,
    draw_filtered,
    draw_plain,
)
from roseinfer.runner.edits.base import AppliesAfterMasks, CountsTokens, LogitEdit
from roseinfer.runner.logprobs import Scores, score
from roseinfer.runner.masks import MaskTable, RowMasks
from roseinfer.runner.rng import uniforms
from roseinfer.runner.rows import SampleAt, SampledRows, Subset, in_parts
from roseinfer.runner.seats import Feature, SeatTable

if TYPE_CHECKING:
    from roseinfer.runner import cuda_sampler

# Values in place of a token where none could be chosen.
NOT_FINITE, NOTHING_LEFT = -1, -2

Edit = tuple[LogitEdit, list[int]]  # an edit and the rows that use it


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """tokens: [n] int64, negative where none could be chosen. `scores` cover the rows `scored` in order."""

    tokens: torch.Tensor
    scored: list[int]
    scores: list[Scores]


class Sampler:
    """Sampler for the seats of one table. It updates their token pool and penalty counts."""

    def __init__(self, seats: SeatTable) -> None:
        self._seats = seats
        self._masks: MaskTable | cuda_sampler.MaskKernel = MaskTable(seats.device)
        self._kernels = None
        # features that need neither float32 logits nor int64 indices
        self._on_any_logits = 0
        if has_triton(seats.device):
            from roseinfer.runner.cuda_sampler import CudaTokenChooser, MaskKernel

            self._kernels = CudaTokenChooser(seats)
            self._masks = MaskKernel()
            self._on_any_logits = Feature.RANDOM | Feature.FILTERED

    def sample(
        self,
        logits: torch.Tensor,
        seats: list[int],
        ends: list[int],
        on_device: SampleAt | None = None,
        masks: RowMasks | None = None,
        greedy: torch.Tensor | None = None,
        drafts_before: Mapping[int, int] | None = None,
    ) -> SampledTokens:
        """Choose one token per row and write it to the token pool.

        logits: [n, V], which may be overwritten. Row i belongs to seat seats[i], whose next token has position ends[i].
        on_device: both on the device, if they are there already. masks: for the rows that may not sample every token.
        greedy: as in `Forwarded`. drafts_before: as in `Samples`.
        """
        rows = self._rows(seats, ends, on_device, drafts_before or {})
        if greedy is not None and masks is None and not rows.any_feature:
            return SampledTokens(greedy.clone(), [], [])
        if rows.any_feature & ~self._on_any_logits:
            rows = replace(rows, seat_index=rows.seat_index.long(), end_index=rows.end_index.long())
            # Edits use a flat view, and a GPU's logits may be columns of a wider buffer.
            logits = logits.float().contiguous()
        raw = self._raw(logits, rows, changes=masks is not None)
        edits = [(edit, rows.that_use(bit)) for bit, edit in self._seats.edits.items() if rows.any_feature & bit]
        self._edit(logits, rows, edits, masks)
        tokens = self._choose(logits, rows)
        for edit, using in edits:
            if isinstance(edit, CountsTokens):
                edit.sampled(tokens, rows, [i for i in using if i not in rows.drafts_before])
        return self._score(tokens, rows, raw)

    def draft(
        self, logits: torch.Tensor, seats: list[int], seat_index: torch.Tensor, end_index: torch.Tensor
    ) -> torch.Tensor:
        """Return a draft [n] int64 for each row of a head's logits [n, W] float32, and change nothing else.

        Each is chosen as the row's seat chooses its token at that position, with the same random number, but from the
        head's logits without edits. `seat_index`, `end_index`: as in `SampledRows`. Sharing the random number does not
        bias outputs, since a token counts only if the model itself has drawn it; it makes drafts right more often.
        """
        best, tokens = likeliest(logits)
        rows = self._rows(seats, [], SampleAt(seat_index, end_index), {})
        if rows.any_feature & Feature.RANDOM:
            self._draw(logits, best, tokens, rows)
        return tokens

    def _edit(self, logits: torch.Tensor, rows: SampledRows, edits: list[Edit], masks: RowMasks | None) -> None:
        """Apply the edits and the masks to the logits. An `AppliesAfterMasks` edit comes after the masks."""
        last = []
        for edit, using in edits:
            if masks is not None and isinstance(edit, AppliesAfterMasks):
                last.append((edit, using))
            else:
                edit.apply(logits, rows, using)
        if masks is not None:
            self._masks.apply(logits, masks)
        for edit, using in last:
            edit.apply_if_possible(logits, rows, using)

    def _choose(self, logits: torch.Tensor, rows: SampledRows) -> torch.Tensor:
        """Return tokens [n] int64, negative without an answer, and write them where the next step reads them."""
        if self._kernels is not None:
            return self._kernels.choose(logits, rows.seat_index, rows.end_index, rows.any_feature)
        best, tokens = likeliest(logits)
        if rows.any_feature & Feature.RANDOM:
            self._draw(logits, best, tokens, rows)
        return self._settle(rows, tokens, best)

    def _rows(
        self, seats: list[int], ends: list[int], on_device: SampleAt | None, drafts_before: Mapping[int, int]
    ) -> SampledRows:
        table = self._seats
        features, any_feature = [table.at(seat).features for seat in seats], 0
        for own in features:
            any_feature |= own
        if on_device is None:
            seat_index, end_index = upload((seats, ends), torch.int64, table.device)
        else:
            seat_index, end_index = on_device
        return SampledRows(seats, ends, seat_index, end_index, features, any_feature, drafts_before)

    def _settle(self, rows: SampledRows, tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Mark rows that have no answer, and write the other rows' tokens where the next step reads them."""
        table = self._seats
        failed = torch.where(best == -torch.inf, NOTHING_LEFT, NOT_FINITE)
        tokens = torch.where(torch.isfinite(best), tokens, failed)
        # A failed row's next step may be submitted already and needs a valid id.
        usable = tokens.clamp_min(0)
        where = rows.seat_index * table.tokens.shape[1] + rows.end_index
        table.tokens.view(-1).index_copy_(0, where, usable.int())
        return tokens

    # --- the draw -----------------------------------------------------------------------------------------------
    def _draw(self, logits: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, rows: SampledRows) -> None:
        """Replace the likeliest token by a draw in the rows that request one."""
        drawn = rows.that_use(Feature.RANDOM)
        filtered = [i for i in drawn if rows.features[i] & Feature.FILTERED]
        plain = [i for i in drawn if not rows.features[i] & Feature.FILTERED]
        for draw, group in ((draw_plain, plain), (draw_filtered, filtered)):
            for part in in_parts(group, logits):
                subset = rows.subset(part)
                settings, u = self._draw_settings(rows, subset)
                subset.write(tokens, draw(subset.of(logits), subset.of(best), settings, u))

    def _draw_settings(self, rows: SampledRows, subset: Subset) -> tuple[DrawSettings, torch.Tensor]:
        """Return settings and random numbers of some rows."""
        seat = subset.of(rows.seat_index)
        temperature, top_p, min_p = self._seats.settings.index_select(0, seat).unbind(1)
        seed, prompt_len, top_k = self._seats.integers.index_select(0, seat).unbind(1)
        params = [self._seats.at(rows.seats[i]).params for i in subset.rows]
        settings = DrawSettings(
            temperature,
            top_p,
            min_p,
            top_k,
            any_min_p=any(p.min_p > 0 for p in params),
            any_whole_mass=any(p.top_p < 1 and p.top_k == 0 for p in params),
            candidates=_candidates([p.top_k for p in params]),
        )
        return settings, uniforms(seed, subset.of(rows.end_index) - prompt_len)

    # --- log probabilities --------------------------------------------------------------------------------------
    def _raw(self, logits: torch.Tensor, rows: SampledRows, changes: bool) -> torch.Tensor | None:
        """Return logits [m, V] of the rows that need log probabilities, safe from edits and other `changes`."""
        if not rows.any_feature & Feature.LOGPROBS:
            return None
        wanted = rows.subset(rows.that_use(Feature.LOGPROBS)).of(logits)
        changes = changes or bool(rows.any_feature & Feature.EDITED)
        return wanted.clone() if changes and wanted is logits else wanted

    def _score(self, tokens: torch.Tensor, rows: SampledRows, raw: torch.Tensor | None) -> SampledTokens:
        if raw is None:
            return SampledTokens(tokens, [], [])
        scored = rows.that_use(Feature.LOGPROBS)
        wanted = [self._seats.at(rows.seats[i]).params.logprobs or 0 for i in scored]
        chosen = rows.subset(scored).of(tokens).clamp_min(0)
        return SampledTokens(tokens, scored, score(raw, chosen, wanted))


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each row of logits [n, V] and its index: [n] and [n] int64. The first of equals wins.

    The value is NaN if the row has one, as with `Tensor.max`. That takes seven times as long on a CPU, since it tracks
    the index of every element. This tracks the best block, and then the best element in it.
    """
    vocab_size = logits.shape[1]
    blocks = vocab_size // BLOCK_TOKENS
    if blocks < 2:
        best, tokens = logits.max(-1)
        return best, tokens
    whole = blocks * BLOCK_TOKENS
    bests = logits[:, :whole].unflatten(1, (blocks, BLOCK_TOKENS)).amax(-1)
    if whole < vocab_size:
        bests = torch.cat((bests, logits[:, whole:].amax(-1, keepdim=True)), -1)
    # The last window begins in the previous block, where everything is smaller.
    first = bests.argmax(-1).mul_(BLOCK_TOKENS).clamp_max_(vocab_size - BLOCK_TOKENS)
    columns = first[:, None] + torch.arange(BLOCK_TOKENS, device=logits.device)
    best, within = logits.gather(1, columns).max(-1)
    return best, first.add_(within)


def _candidates(top_k: list[int]) -> tuple[int, ...]:
    """Return numbers of candidates to try. The first exceeds the largest k by one, so that a tie at the
    border shows.
    """
    needed = [k + 1 if k else MIN_CANDIDATES for k in top_k]
    first = max((n for n in needed if n < MAX_CANDIDATES), default=MIN_CANDIDATES)
    return (first, MAX_CANDIDATES)
