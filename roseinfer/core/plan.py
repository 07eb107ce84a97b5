"""The one contract between scheduler and runner: a `StepPlan` goes in, a `StepResult` comes out.

Plans are plain data and a diff: a request is described in full once (`Admission`), later only by what changed (`Row`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.sampling import SamplingParams


class BlockCopy(NamedTuple):
    """Copy the first `tokens` slots of KV block `src` into `dst`, in every layer, before the forward pass.

    No block is both a source and a destination of the same step, and none is twice a destination.
    """

    src: int
    dst: int
    tokens: int


class HostCopy(NamedTuple):
    """Copy KV block `block` and host block `host` whole, every layer of them: from the host in `StepPlan.loads`, to it
    in `StepPlan.stores`.
    """

    block: int
    host: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a seat. Everything the runner must know of it, sent once (again after a preemption).

    `token_ids` are all known tokens (prompt, then outputs so far); the first `prompt_len` are the prompt.
    `blocks` is the block table so far (prefix hits); rows add to it. `stop_ids` are the token ids that end the
    request and so must not be sampled before `min_tokens`.
    """

    request_id: str
    seat: int
    token_ids: Sequence[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    blocks: tuple[int, ...]


class Row(NamedTuple):
    """Compute `count` tokens of a seated request, from position `start`.

    The inputs are read from the seat's token pool, so a sampled token that the host has not seen yet can be the next
    input. `logits` = how many trailing positions need logits: 0 while a prompt is being chunked, 1 to sample, `count`
    for prompt logprobs. `sample` says whether the last position's logits choose a token. K/V is written at positions
    >= `write_from` only. `new_blocks` replaces the block table from entry `table_from` on.

    `drafts` are guesses of the tokens behind the one at `start`, to be verified: `count` and `logits` are then
    1 + len(drafts), and `sample` is true. They are the inputs at `start` + 1 and following. The runner samples a token
    from each position's logits, as if the drafts before it were output; a draft is right if it is the token sampled
    before it. The result has the tokens up to the first wrong draft, with that one's replacement: one at least, `count`
    at most. K/V of wrong drafts stays in its slots, which later rows write again before anybody reads them.
    """

    request_id: str
    seat: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a row
    logits: int
    sample: bool
    write_from: int
    table_from: int
    new_blocks: tuple[int, ...]
    drafts: tuple[int, ...] = ()


RowFields = tuple[str, int, int, int, int, bool, int, int, tuple[int, ...], tuple[int, ...]]
# A row from all of its fields, without the named tuple's own __new__, which would double its cost: one is made for each
# running request and step.
new_row: Callable[[RowFields], Row] = partial(tuple.__new__, Row)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that one step holds: rows, and tokens of all rows. The scheduler plans within them and the runner makes
    its buffers for them, so both are given the same.
    """

    max_rows: int
    max_tokens: int

    @classmethod
    def of(cls, config: SchedulerConfig, max_model_len: int) -> "StepLimits":
        """What the options allow if a context has at most `max_model_len` tokens.

        Prompts that are not chunked may exceed the budget. Such a prompt does not wait until a step is empty, which
        under load could take for ever: it runs in one step with the requests that decode, as many as the budget allows
        beside one of its tokens.
        """
        budget = config.largest_step
        rows = min(config.seats, budget)
        return cls(rows, budget if config.enable_chunked_prefill else max(budget, max_model_len + rows - 1))

    def check(self, plan: "StepPlan") -> None:
        """Assert that a plan is within the limits."""
        rows, tokens = len(plan.rows), plan.num_tokens
        assert rows <= self.max_rows, f"a step of {rows} rows exceeds the limit of {self.max_rows}"
        assert tokens <= self.max_tokens, f"a step of {tokens} tokens exceeds the limit of {self.max_tokens}"


@dataclass(slots=True)
class StepPlan:
    """One engine step: `released` seats are forgotten, `admitted` seated, `copies` applied at once, `rows` computed.

    `num_tokens`: computed by all rows together, drafts included. `num_drafts`: drafts of all rows together. `guided`:
    indices of the rows that sample for a request with a guide; their masks come with `Runner.sample`.

    `loads` and `stores` copy between KV blocks and blocks in host memory while the rows are computed, or with no rows
    at all. Stores read what earlier steps have left, loads come behind whatever this step does to the blocks of
    `released` seats. Both are complete when the step is collected, and not before: until then the scheduler gives
    neither side to anybody, and only plans that it makes later compute rows that read a loaded block, store it or load
    from a stored one. `check_host_copies` says what else holds.
    """

    step: int
    rows: list[Row]
    admitted: list[Admission] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    guided: tuple[int, ...] = ()
    loads: list[HostCopy] = field(default_factory=list)
    stores: list[HostCopy] = field(default_factory=list)

    def check_host_copies(self, num_blocks: int, num_host_blocks: int) -> None:
        """Assert that loads and stores can go on beside each other, the rows and the copies, in any order.

        Each side exists. What is written is written once and by nothing else of this step: a loaded block is no other's
        target and no source, and a host block that is stored to is not loaded from. Several loads may read one host
        block, and rows may read a block that is being stored.
        """
        loaded, stored_to = [copy.block for copy in self.loads], [copy.host for copy in self.stores]
        for copy in (*self.loads, *self.stores):
            assert 0 <= copy.block < num_blocks and 0 <= copy.host < num_host_blocks, f"{copy} is outside the memory"
        assert len(set(loaded)) == len(loaded), "a block is loaded twice"
        assert len(set(stored_to)) == len(stored_to), "a host block is stored to twice"
        assert set(stored_to).isdisjoint(copy.host for copy in self.loads), "a host block is stored to and loaded from"
        stored = {copy.block for copy in self.stores}
        assert stored.isdisjoint(loaded), "a block is loaded and stored"
        written = {copy.dst for copy in self.copies}.union(*(row.new_blocks for row in self.rows))
        assert written.isdisjoint(loaded), "a block is loaded and written"
        assert written.isdisjoint(stored), "a block is stored and written"
        read = {copy.src for copy in self.copies}.union(*(admission.blocks for admission in self.admitted))
        assert read.isdisjoint(loaded), "a block is read in the step that loads it"


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows of a plan may sample; every token is allowed to the other rows.

    `rows` are indices into the plan's rows, in any order and without repetition. `words` holds a line of ceil(V / 32)
    unsigned 32-bit integers for each of them, V = tokens of the vocabulary: bit v % 32 of integer v // 32 says whether
    token v is allowed. Bits from V on mean nothing.
    """

    rows: tuple[int, ...]
    words: "memoryview[int]"

    @staticmethod
    def words_per_line(vocab_size: int) -> int:
        """Integers in the line of one row."""
        return -(-vocab_size // 32)


class TokenLogprobs(NamedTuple):
    """Log probability of one chosen token and of the likeliest ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RowResult(NamedTuple):
    """What one row produced: its sampled tokens, and perhaps an error that ends this request alone.

    `token_ids`: none if the row does not sample, one if it does, up to 1 + len(drafts) if it carries drafts. If a
    position failed they are those sampled before it. `logprobs` has an entry for each of them if the request wants any.
    `prompt_logprobs` covers positions start+1 .. start+count of the prompt (as far as it reaches).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


RowResultFields = tuple[
    str, tuple[int, ...], tuple[TokenLogprobs, ...] | None, tuple[TokenLogprobs, ...] | None, str | None
]
# As `new_row`, and for the same reason.
new_row_result: Callable[[RowResultFields], RowResult] = partial(tuple.__new__, RowResult)


@dataclass(slots=True)
class StepResult:
    """Results in the order of the plan's rows. `duration_s`: wall time of the step as the runner saw it.

    `loads_s`, `stores_s`: seconds that the plan's loads and stores took, each by itself; 0 if nobody measured them.
    `copies_first`: the rows came behind them, not beside them, so that `duration_s` is the sum.
    """

    step: int
    rows: list[RowResult]
    duration_s: float = 0.0
    loads_s: float = 0.0
    stores_s: float = 0.0
    copies_first: bool = False
