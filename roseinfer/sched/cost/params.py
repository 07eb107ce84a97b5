"""Cost model: the seconds that a step takes, as a linear function of its work.

    seconds = c0 + cp * Np + ca * X + cd * Nd + ck * K + cb * B + ce * R

Np: prompt tokens computed. X: positions that those attend to, summed. Nd: decoding rows. K: context tokens that those
read. B: tokens before each prompt chunk, summed over the chunks: each chunk reads them once, whatever its length.
R, for models with experts only: how many experts a layer reads for all tokens of the step (`ExpertChoice.read`). R is
linear in the first few tokens and saturates when all experts are read. So the cost of one more row or prompt depends on
what the step holds already.

K and B count K/V by its bytes (`ContextReads`). Layers with a window read no more than the window. A recurrent state
counts in B as the K/V with as many bytes, for each chunk that continues it and each copy; a snapshot, which is only
written, counts half. The state of a decoding row is part of cd. X ignores windows: what a token attends to in one is
nearly constant, and part of cp.

Drafts add to that what `drafts.py` says. `online_fit.py` fits the constants while the engine runs, and `offline_fit.py`
fits them to recorded steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import NamedTuple, Self

from roseinfer.core.plan import Row, StateChanges
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads, ExpertChoice
from roseinfer.core.step_cost import StepCost
from roseinfer.sched.cost import drafts as draft_costs
from roseinfer.sched.cost.drafts import DraftCost

_MIN_CHUNK_RATIO = 4.0  # seconds of a chunk, as a multiple of the seconds for reading the context before it
_HALVINGS_COUNT = 32
_MAX_NEWTON_STEPS = 8


class Work(NamedTuple):
    """Work of one step: Np, X, Nd, K, B, and its drafts.

    A row that verifies drafts counts as a decoding row; `draft_tokens` are the further tokens that it computes.
    `draft_context`: context tokens before each of them, summed. `head_steps`, `head_drafts`: draft steps of a head, and
    drafts that it makes.
    """

    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    decode_rows: int = 0
    decode_context: float = 0
    prompt_context: float = 0
    draft_tokens: int = 0
    draft_context: int = 0
    head_steps: int = 0
    head_drafts: int = 0

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """Features of the fit, without experts and drafts."""
        return self[:5]

    @property
    def draft_features(self) -> draft_costs.Features:
        """Features of `DraftCost`."""
        others, head = self.prompt_tokens + self.decode_rows, (self.head_steps, self.head_drafts)
        return draft_costs.features(others, self.draft_tokens, self.draft_context, *head)

    @property
    def has_drafts(self) -> bool:
        """True if the step verifies or makes drafts."""
        return self.draft_tokens > 0 or self.head_steps > 0

    @property
    def tokens(self) -> int:
        """Count of all tokens that the step computes."""
        return self.prompt_tokens + self.decode_rows + self.draft_tokens


@dataclass(frozen=True, slots=True)
class CostParams:
    """Constants of the cost model, in seconds: per step, prompt token, pair of prompt tokens, decoding row, context
    token of a decoding row, and token before each chunk of a prompt.

    `load_s`, `store_s`: per KV block copied from and to host memory. They are measured, not fitted. The defaults are
    for 2.25 MiB (16 tokens of a model with 8B parameters in 16 bits) over PCIe 5.

    `expert_s`: per expert that a layer reads in a step, for all layers. `experts`: number of experts, and how many a
    token needs; None for a model without experts, which has no use for `expert_s`. `drafts`: what drafts add to a step;
    None until a step has shown it (see `draft_cost`). `reads`: what rows of the model read of their contexts.

    With experts, what a row or chunk adds to a step depends on the step's other tokens, whose experts are read anyway.
    `beside` is the number of these tokens; inf means that all experts are read.
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
    drafts: DraftCost | None = None
    reads: ContextReads = WHOLE_CONTEXT

    def work(self, rows: Sequence[Row], ahead: Sequence[int] = (), states: StateChanges | None = None) -> Work:
        """Return the work of a step's rows. A row of one token counts as decoding, because it costs as much.

        `ahead`, `states`: as in `StepPlan`.
        """
        contexts, starts = [row[2] + 1 for row in rows if row[3] == 1], list[int]()  # of decoding rows, and of chunks
        tokens, found, draft_tokens, draft_context = 0, 0.0, 0, 0
        for _, _, start, count, _, _, _, _, _, drafts in [row for row in rows if row[3] != 1]:
            if drafts:  # reads its context once, like a decoding row
                contexts.append(start + 1)
                draft_tokens += len(drafts)
                draft_context += len(drafts) * (start + 1)
            else:
                starts.append(start)
                tokens += count
                found += pairs(start, count)
        head = (max(ahead), sum(ahead)) if ahead else (0, 0)
        moved = len(starts) + (0 if states is None else len(states.copies) + 0.5 * len(states.snapshots))
        read, before = self.reads.of(*contexts), self.reads.of(*starts) + self.reads.state_tokens * moved
        return Work(tokens, found, len(contexts), read, before, draft_tokens, draft_context, *head)

    def seconds(self, work: Work) -> float:
        linear_s = (
            self.step_s
            + self.token_s * work.prompt_tokens
            + self.pair_s * work.prompt_pairs
            + self.row_s * work.decode_rows
            + self.context_s * work.decode_context
            + self.chunk_context_s * work.prompt_context
        )
        if work.has_drafts:
            linear_s += self.drafts_s(work)
        return linear_s if self.experts is None else linear_s + self.experts_s(work.tokens)

    def drafts_s(self, work: Work) -> float:
        """Return what the drafts of a step add to it, without the experts of their tokens."""
        return self.draft_cost.seconds(work.draft_features)

    @property
    def draft_cost(self) -> DraftCost:
        """Costs of drafts beyond their experts, guessed until a step has shown them."""
        if self.drafts is not None:
            return self.drafts
        return DraftCost.guess(self.step_s, max(self.token_s, self.row_s), self.pair_s)

    def copies_s(self, loads: int, stores: int) -> float:
        """Return the time of copying blocks in both directions at once."""
        return max(self.load_s * loads, self.store_s * stores)

    def experts_s(self, tokens: float, beside: float = 0.0) -> float:
        """Return what reading the experts of `tokens` tokens adds to a step; 0 for a model without experts."""
        if self.experts is None:
            return 0.0
        read = self.experts.read
        return self.expert_s * (read(beside + tokens) - read(beside))

    def rows_s(self, rows: float, context: float) -> float:
        """Return the time of a step of decoding rows only, which read `context` tokens together."""
        return self.step_s + self.row_s * rows + self.context_s * context + self.experts_s(rows)

    def alone_s(self, context: float) -> float:
        """Return the time of a step of one decoding row with `context` tokens."""
        return self.rows_s(1, self.reads.of(context))

    def decode_s(self, contexts: Sequence[int]) -> float:
        """Return what decoding rows with these contexts add to a step, without experts."""
        return self.row_s * len(contexts) + self.context_s * self.reads.of(*contexts)

    def one_row_s(self, context: int, beside: float) -> float:
        """Return what a decoding row with `context` tokens adds to a step."""
        return self.row_s + self.context_s * self.reads.of(context) + self.experts_s(1, beside)

    def cost_tangent(self, pace_s: float, context: float) -> tuple[float, float]:
        """Return seconds per step and for the experts of each row, from the tangent to the cost of rows.

        The tangent touches the cost curve where rows with `context` tokens each fill a step of `pace_s` seconds. There,
        tangent and curve agree on when the machine is full and on what one more row takes; with fewer rows the tangent
        is above the curve. Without experts the result is `step_s` and 0.
        """
        if self.experts is None:
            return self.step_s, 0.0
        if pace_s == inf:
            return self.step_s + self.experts_s(inf), 0.0
        each_s, rows = self.row_s + self.context_s * context, 0.0
        for _ in range(_MAX_NEWTON_STEPS):  # the cost of rows is concave: Newton's method converges from below
            left_s = pace_s - self.rows_s(rows, rows * context)
            next_s = each_s + self.experts_s(1, rows)
            if left_s <= 0 or next_s <= 0:
                break
            rows += left_s / next_s
        row_s = self.experts_s(1, rows)
        return self.step_s + self.experts_s(rows) - rows * row_s, row_s

    def step_shares(self, rate: float, visits: float, most: float) -> tuple[float, float]:
        """Return the time shares of `rate` steps per second and of the experts of `visits` rows per second.

        Each row is charged as one more row would be, and the rest of the experts belongs to the step. `most`: limit on
        the share of `step_s`.
        """
        constant = min(most, self.step_s * rate)
        if self.experts is None:
            return constant, 0.0
        rows = visits * self.experts_s(1, visits / rate)
        return constant + rate * self.experts_s(visits / rate) - rows, rows

    def before_s(self, start: int) -> float:
        """Return the time for reading what a chunk from position `start` continues."""
        return self.chunk_context_s * (self.reads.of(start) + self.reads.state_tokens)

    def prefill_s(self, start: int, count: int, beside: float = 0.0) -> float:
        """Return what a chunk of `count` prompt tokens from position `start` adds to a step."""
        if not count:
            return 0.0
        seconds = self.token_s * count + self.pair_s * pairs(start, count) + self.before_s(start)
        return seconds if self.experts is None else seconds + self.experts_s(count, beside)

    def prefill_tokens(self, start: int, seconds: float, beside: float = 0.0) -> float:
        """Return the `count` of prompt tokens from position `start` for which `prefill_s` is `seconds`; 0 if even one
        token takes longer.
        """
        seconds -= self.before_s(start)
        if seconds <= 0:
            return 0.0
        most = self._linear_tokens(start, seconds)
        if self.experts is None:
            return most
        least = self._linear_tokens(start, max(0.0, seconds - self.experts_s(inf, beside)))
        each_s, half_s = self.token_s + self.pair_s * (start + 0.5), 0.5 * self.pair_s
        for _ in range(_HALVINGS_COUNT):
            middle = (least + most) / 2
            if middle * (each_s + half_s * middle) + self.experts_s(middle, beside) > seconds:
                most = middle
            else:
                least = middle
        return least

    def _linear_tokens(self, start: int, seconds: float) -> float:
        """Return the same without experts and context before the chunk: the root of a quadratic equation."""
        each, half = self.token_s + self.pair_s * (start + 0.5), 0.5 * self.pair_s
        return 2 * seconds / (each + sqrt(each * each + 4 * half * seconds))

    def is_worth_a_chunk(self, start: int, seconds: float, beside: float = 0.0) -> bool:
        """True if `seconds` for a chunk from position `start` are well spent.

        At most a quarter of them may go into reading what the chunk continues, and experts that no other row needs.
        Each chunk reads these again, so many small chunks after a long context take far longer than a few large ones.
        """
        return _MIN_CHUNK_RATIO * (self.before_s(start) + self.experts_s(inf, beside)) <= seconds

    @classmethod
    def of(cls, published: StepCost) -> Self:
        """Return the constants that an engine has published; the others are the defaults."""
        return cls(**published._asdict())

    @property
    def published(self) -> StepCost:
        return StepCost(self.step_s, self.token_s, self.row_s, self.context_s, self.expert_s)

    def slower(self, factor: float) -> "CostParams":
        """Return the constants of a machine that takes `factor` times as long, also for copies."""
        scaled = self.with_values([factor * value for value in self.values()])
        drafts = None if self.drafts is None else self.drafts.slower(factor)
        return replace(scaled, load_s=factor * self.load_s, store_s=factor * self.store_s, drafts=drafts)

    def values(self) -> tuple[float, ...]:
        """Return the constants that are fitted to steps: those of rows and, for models with experts, `expert_s`."""
        fitted = self.step_s, self.token_s, self.pair_s, self.row_s, self.context_s, self.chunk_context_s
        return fitted if self.experts is None else (*fitted, self.expert_s)

    def features(self, work: Work) -> tuple[float, ...]:
        """Return the step's features, in the order of `values`."""
        linear = 1.0, *work.features
        return linear if self.experts is None else (*linear, self.experts.read(work.tokens))

    def with_values(self, values: Sequence[float]) -> "CostParams":
        """Return a copy with other `values`."""
        # `values` ends with `expert_s` only for models with experts.
        step_s, token_s, pair_s, row_s, context_s, before_s, expert_s = (*values, self.expert_s)[:7]
        rows = step_s, token_s, pair_s, row_s, context_s, before_s
        return CostParams(*rows, self.load_s, self.store_s, expert_s, self.experts, self.drafts, self.reads)


def pairs(start: int, count: int) -> float:
    """Return X for `count` prompt tokens from position `start`: position p attends to p + 1 tokens."""
    return count * start + count * (count + 1) / 2
