"""What a step does and what that takes: a linear model of its work.

    seconds = c0 + cp * Np + ca * X + cd * Nd + ck * K + cb * B + ce * R

Np: prompt tokens computed. X: for those, the positions they attend to, summed. Nd: rows that decode. K: context tokens
that these attend to. B: tokens before each prompt chunk, summed over the chunks: a chunk reads them once, however short
it is. R, for models with experts only: how many of these a layer reads for all tokens of the step
(`ExpertChoice.read`). It is linear in the first few tokens and ends where all experts are read, so what one more row or
a prompt costs depends on what the step holds already.

What else a step does is counted apart (`Work.draft_tokens`) and has a price. `cost_model.py` fits the constants to
steps while the engine runs, `fit.py` to recorded ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import NamedTuple

from roseinfer.core.plan import Row
from roseinfer.core.runner import ExpertChoice

_CHUNK_WORTH = 4.0  # times what it takes to read the context before it
_HALVINGS = 32  # of the interval in which the tokens are that fit a time
_TANGENTS = 8


class Work(NamedTuple):
    """What one step does: Np, X, Nd, K, B, and what the model has no constant for.

    A row that verifies drafts counts as one that decodes; `draft_tokens` are the tokens that it computes beyond that.
    """

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    decode_rows: int = 0
    decode_context: int = 0
    prompt_context: int = 0
    draft_tokens: int = 0

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """What the model is fitted to, experts aside."""
        return self[:5]

    @property
    def tokens(self) -> int:
        """All that the step computes."""
        return self.prompt_tokens + self.decode_rows + self.draft_tokens

    @property
    def fits(self) -> bool:
        """Whether the features are all that the step does, so that its time says something of their constants."""
        return not self.draft_tokens


@dataclass(frozen=True, slots=True)
class CostParams:
    """Seconds: of any step, per prompt token, per pair of prompt tokens, per decode row, per context token of these,
    and per token that comes before a chunk of a prompt, for each chunk.

    A draft costs what a prompt token does, which is more than it takes in small steps.

    `load_s`, `store_s`: per KV block that is copied from host memory and to it, beside the rows. They are measured, not
    fitted; to begin with, those of 2.25 MiB (16 tokens of 8B parameters in 16 bits) over PCIe 5.

    `expert_s`: per expert that a layer reads in a step, for all layers. `experts`: of how many, and how many a token
    needs; None for a model without experts, of which `expert_s` says nothing.

    What something adds to a step depends with experts on what that has already: `beside` are its other tokens, of which
    the experts are read anyway; inf: all are.
    """

    step_s: float = 5e-3
    token_s: float = 20e-6
    pair_s: float = 0.0
    row_s: float = 20e-6
    context_s: float = 20e-9
    chunk_context_s: float = 0.0
    load_s: float = 50e-6
    store_s: float = 50e-6
    expert_s: float = 0.0
    experts: ExpertChoice | None = None

    def seconds(self, work: Work) -> float:
        linear_s = (
            self.step_s
            + self.token_s * work.prompt_tokens
            + self.pair_s * work.prompt_pairs
            + self.row_s * work.decode_rows
            + self.context_s * work.decode_context
            + self.chunk_context_s * work.prompt_context
            + self.token_s * work.draft_tokens
        )
        return linear_s if self.experts is None else linear_s + self.experts_s(work.tokens)

    def copies_s(self, loads: int, stores: int) -> float:
        """What so many blocks take, the two directions at the same time."""
        return max(self.load_s * loads, self.store_s * stores)

    def experts_s(self, tokens: float, beside: float = 0.0) -> float:
        """What reading their experts adds to a step, 0 for a model without experts."""
        if self.experts is None:
            return 0.0
        read = self.experts.read
        return self.expert_s * (read(beside + tokens) - read(beside))

    def rows_s(self, rows: float, context: float) -> float:
        """A step of so many decoding rows, which attend to `context` tokens in all, and of nothing else."""
        return self.step_s + self.row_s * rows + self.context_s * context + self.experts_s(rows)

    def one_row_s(self, context: int, beside: float) -> float:
        """What a decoding row with so much context adds to a step."""
        return self.row_s + self.context_s * context + self.experts_s(1, beside)

    def line(self, pace_s: float, context: float) -> tuple[float, float]:
        """Near a full machine, what any step costs, and what the experts of each row cost: those of the straight line
        that touches what rows cost where they fill a step of `pace_s` seconds, each with so much context.

        So a machine with a step every `pace_s` is full by the line when it is by the curve, and what one thing takes
        from another there is right; with fewer rows the line says more. Without experts: `step_s` and 0.
        """
        if self.experts is None:
            return self.step_s, 0.0
        if pace_s == inf:
            return self.step_s + self.experts_s(inf), 0.0
        each_s, rows = self.row_s + self.context_s * context, 0.0
        for _ in range(_TANGENTS):  # what rows cost is concave: Newton's way comes from below
            left_s = pace_s - self.rows_s(rows, rows * context)
            next_s = each_s + self.experts_s(1, rows)
            if left_s <= 0 or next_s <= 0:
                break
            rows += left_s / next_s
        row_s = self.experts_s(1, rows)
        return self.step_s + self.experts_s(rows) - rows * row_s, row_s

    def prefill_s(self, start: int, count: int, beside: float = 0.0) -> float:
        """What a chunk of `count` prompt tokens from position `start` on adds to a step."""
        if not count:
            return 0.0
        seconds = self.token_s * count + self.pair_s * pairs(start, count) + self.chunk_context_s * start
        return seconds if self.experts is None else seconds + self.experts_s(count, beside)

    def prefill_tokens(self, start: int, seconds: float, beside: float = 0.0) -> float:
        """How many prompt tokens from position `start` on add so many seconds to a step; 0 if those are too few: the
        count with `prefill_s(start, count, beside) = seconds`.
        """
        seconds -= self.chunk_context_s * start
        if seconds <= 0:
            return 0.0
        most = self._linear_tokens(start, seconds)
        if self.experts is None:
            return most
        least = self._linear_tokens(start, max(0.0, seconds - self.experts_s(inf, beside)))
        each_s, half_s = self.token_s + self.pair_s * (start + 0.5), 0.5 * self.pair_s
        for _ in range(_HALVINGS):
            middle = (least + most) / 2
            if middle * (each_s + half_s * middle) + self.experts_s(middle, beside) > seconds:
                most = middle
            else:
                least = middle
        return least

    def _linear_tokens(self, start: int, seconds: float) -> float:
        """The same if no expert is read for them, nor what comes before them: the root of a square equation."""
        each, half = self.token_s + self.pair_s * (start + 0.5), 0.5 * self.pair_s
        return 2 * seconds / (each + sqrt(each * each + 4 * half * seconds))

    def worth_a_chunk(self, start: int, seconds: float, beside: float = 0.0) -> bool:
        """Whether so many seconds for a prompt are well spent on a chunk from position `start` on.

        No more than a quarter of them may go into reading what comes before it, and experts that nobody else needs:
        each chunk does that, so that many small ones behind a long context would take far longer than a few larger ones
        later.
        """
        return _CHUNK_WORTH * (self.chunk_context_s * start + self.experts_s(inf, beside)) <= seconds

    def slower(self, factor: float) -> "CostParams":
        """Those of a machine that takes `factor` times as long, for copies too."""
        scaled = self.with_values([factor * value for value in self.values()])
        return replace(scaled, load_s=factor * self.load_s, store_s=factor * self.store_s)

    def values(self) -> tuple[float, ...]:
        """The constants that are fitted to steps: those of rows and, where there are any, of experts."""
        fitted = self.step_s, self.token_s, self.pair_s, self.row_s, self.context_s, self.chunk_context_s
        return fitted if self.experts is None else (*fitted, self.expert_s)

    def features(self, work: Work) -> tuple[float, ...]:
        """What a step has of each of these."""
        linear = 1.0, *work.features
        return linear if self.experts is None else (*linear, self.experts.read(work.tokens))

    def with_values(self, values: Sequence[float]) -> "CostParams":
        """With others of these."""
        step_s, token_s, pair_s, row_s, context_s, before_s, *rest = values
        expert_s = rest[0] if rest else self.expert_s
        return CostParams(
            step_s, token_s, pair_s, row_s, context_s, before_s, self.load_s, self.store_s, expert_s, self.experts
        )


def pairs(start: int, count: int) -> float:
    """Pairs of tokens (X) that `count` prompt tokens from position `start` on make: position p attends to p + 1."""
    return count * start + count * (count + 1) / 2


def work_of(rows: Sequence[Row]) -> Work:
    """Position p attends to p + 1 tokens. A row of one token counts as decoding, which is what it costs."""
    several = [row for row in rows if row[3] != 1]
    decodes = len(rows) - len(several)
    context = sum([row[2] for row in rows]) + decodes
    tokens, found, before, draft_tokens = 0, 0.0, 0, 0
    for _, _, start, count, _, _, _, _, _, drafts in several:
        if drafts:  # reads its context once, as a row that decodes
            decodes += 1
            context += 1
            draft_tokens += len(drafts)
        else:
            tokens += count
            found += pairs(start, count)
            before += start
    return Work(tokens, found, decodes, context - before, before, draft_tokens)
