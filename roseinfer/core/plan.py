"""Contract between scheduler and runner: a `StepPlan` goes in, a `StepResult` comes out.

Plans are plain data and a diff: a request is described in full once (`Admission`), later only by its changes (`Row`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from roseinfer.core.adapters import AdapterLoad
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.pooling import PoolingParams
from roseinfer.core.sampling import SequenceParams


class BlockCopy(NamedTuple):
    """Copy the first `tokens` slots of KV block `src` into `dst`, in every layer, before the forward pass.

    Within a step no block is both a source and a destination, or a destination twice.
    """

    src: int
    dst: int
    tokens: int


class HostCopy(NamedTuple):
    """Copy all layers of a whole block, from `host` to `block` in `StepPlan.loads` and the other way in
    `StepPlan.stores`. In `StateChanges` both are slots of recurrent states.
    """

    block: int
    host: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a seat. Holds everything the runner must know of it; sent once, and again after a preemption.

    `token_ids`: all known tokens, prompt then outputs so far; the first `prompt_len` are the prompt. `blocks`: block
    table so far (prefix hits), which rows extend. `stop_ids`: token ids that end the request, so they must not be
    sampled before `min_tokens`. `pooling`: set for a prompt-only request. `adapter_slot`: slot of its LoRA adapter; -1:
    the model itself.
    """

    request_id: str
    seat: int
    token_ids: Sequence[int]
    prompt_len: int
    params: SequenceParams
    seed: int
    stop_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    pooling: PoolingParams | None = None
    adapter_slot: int = -1


class Row(NamedTuple):
    """Compute `count` tokens of a seated request, from position `start`.

    In a row of a prompt-only request, `sample` means that the request's vector is complete, and positions with
    `logits` are those whose hidden states count.

    The inputs come from the seat's token pool, so a sampled token that the host has not seen yet can be the next input.
    `logits`: number of trailing positions that need logits: 0 within a chunked prompt, 1 to sample, `count` for prompt
    logprobs. `sample`: whether to sample a token from the last position. K/V is written only at positions >=
    `write_from`. `new_blocks` replaces the block table from entry `table_from` on.

    `drafts` are guesses of the tokens after the one at `start`, to be verified. `count` and `logits` are then 1 +
    len(drafts), `sample` is true, and drafts are the inputs from `start` + 1 on. The runner samples a token at each
    position as if all drafts before it were output. A draft is right if it equals the token sampled before it. The
    result has the tokens up to and including the replacement of the first wrong draft: between 1 and `count`. K/V of
    wrong drafts stays in its slots, which later rows overwrite before they are read. A recurrent state consumes right
    drafts in the next row.
    """

    request_id: str
    seat: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is never called on a row
    logits: int
    sample: bool
    write_from: int
    table_from: int
    new_blocks: tuple[int, ...]
    drafts: tuple[int, ...] = ()


RowFields = tuple[str, int, int, int, int, bool, int, int, tuple[int, ...], tuple[int, ...]]
# Make a row from all of its fields. The named tuple's own __new__ would double the cost, and one is made for each
# running request and step.
new_row: Callable[[RowFields], Row] = partial(tuple.__new__, Row)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Maximum rows, total tokens and total drafts of one step. The scheduler plans within them; the runner sizes its
    buffers by them.
    """

    max_rows: int
    max_tokens: int
    max_drafts: int = 0

    @classmethod
    def of(cls, config: SchedulerConfig, max_model_len: int, max_drafts: int = 0) -> "StepLimits":
        """Return the limits that the options imply if a context has at most `max_model_len` tokens.

        Prompts that are not chunked may exceed the token budget. Such a prompt does not wait for an empty step, which
        might never come under load. It runs together with as many decoding requests as the budget allows beside one of
        its tokens.
        """
        budget = config.largest_step
        rows = min(config.seats, budget)
        tokens = budget if config.enable_chunked_prefill else max(budget, max_model_len + rows - 1)
        return cls(rows, tokens, max_drafts)

    def check(self, plan: "StepPlan") -> None:
        """Assert that `plan` is within the limits."""
        rows, tokens = len(plan.rows), plan.num_tokens
        assert rows <= self.max_rows, f"a step of {rows} rows exceeds the limit of {self.max_rows}"
        assert tokens <= self.max_tokens, f"a step of {tokens} tokens exceeds the limit of {self.max_tokens}"
        assert plan.num_drafts <= self.max_drafts, f"a step of {plan.num_drafts} drafts, more than {self.max_drafts}"


class TableChange(NamedTuple):
    """A seat's block table in a further KV group is `blocks` from entry `table_from` on."""

    seat: int
    table_from: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupChanges:
    """Changes of a step in one further KV group, whose blocks are in a pool of their own.

    `tables`: of seats that are admitted or grow, in the order in which they apply. Entries before the first of a seat
    are undefined, as are those of blocks that have left the group's window: no later row reads them. `copies`: as
    `StepPlan.copies`, among the group's blocks.
    """

    tables: tuple[TableChange, ...] = ()
    copies: tuple[BlockCopy, ...] = ()


class SlotChange(NamedTuple):
    """An admitted request's recurrent state is in `slot` from now on. A row that starts at position 0 begins from
    zeros, whatever the slot holds.
    """

    seat: int
    slot: int


class SlotCopy(NamedTuple):
    """Copy the recurrent state of all layers from slot `src` to `dst`, before the forward pass."""

    src: int
    dst: int


class StateSnapshot(NamedTuple):
    """Store the recurrent state of the plan's row `row` after its first `tokens` tokens in `slot` as well.

    tokens: at least 1; drafts do not count. 0 or less: so many tokens before the row's first one, among the drafts of
    the request's last row that were right.
    """

    row: int
    tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateChanges:
    """Changes of a step in the state group: one slot for each seat, and slots that keep the state at a position.

    `copies` are applied together. No slot is a source and a destination; a source may have several destinations.
    `loads` and `stores` copy between slots and slots in host memory, under the conditions of `StepPlan.loads`.
    """

    slots: tuple[SlotChange, ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    snapshots: tuple[StateSnapshot, ...] = ()
    loads: tuple[HostCopy, ...] = ()
    stores: tuple[HostCopy, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One engine step: forget `released` seats, seat `admitted` requests, apply `copies` together, compute `rows`.

    `num_tokens`: tokens computed by all rows, drafts included. `num_drafts`: drafts of all rows. `guided`: indices of
    the rows that sample for a request with a guide; their masks come with `Runner.sample`.

    `ahead`: for each row, how many tokens the runner's draft head guesses after the row's last output; empty = none.
    Such a row samples. Its block table has room for the tokens that it computes and as many more.

    `admitted`, `rows` and `copies` name blocks of the first KV group. `groups`: changes of each further group; empty =
    no block changes in any. `states`: changes of the state group; None = no change, or the model has none.

    `loads` and `stores` copy between KV blocks and blocks in host memory, while the rows are computed or without any
    rows. Stores read what earlier steps have written. Loads happen after this step's changes to blocks of `released`
    seats. Both are complete when the step is collected, not earlier. Until then the scheduler reuses neither side; only
    later plans may read a loaded block or load from a stored one. `check_host_copies` asserts further conditions.

    `adapter_loads` copy LoRA adapters to slots that no row of this plan or of a step in flight uses, under the same
    rules: complete once the step is collected, and only rows of later plans use them. A slot may hold other adapters
    while a seated request has no rows, but again its own when it has some.
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
    ahead: tuple[int, ...] = ()
    groups: tuple[GroupChanges, ...] = ()
    states: StateChanges | None = None
    adapter_loads: tuple[AdapterLoad, ...] = ()

    def check_host_copies(self, num_blocks: int, num_host_blocks: int) -> None:
        """Assert that loads and stores can run concurrently with each other, the rows and the copies, in any order.

        All blocks exist. Whatever is written is written once: a loaded block is not a target or source of anything else
        in this step, and a host block that is stored to is not loaded from. Several loads may read one host block, and
        rows may read a block that is being stored.
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
    """Tokens that some rows of a plan may sample; the other rows are unrestricted.

    `rows`: indices into the plan's rows, in any order. `words`: for each of them ceil(V / 32) unsigned 32-bit
    integers, where V is the vocabulary size. Bit v % 32 of integer v // 32 is set if token v is allowed. Bits from V on
    are ignored.

    A row with drafts may have a mask for each of its tokens. Then `rows` names it several times, and `drafts_before[i]`
    says how many of its drafts come before the token that mask i restricts. Empty = 0 for all. A token without a mask
    is unrestricted.
    """

    rows: tuple[int, ...]
    words: "memoryview[int]"
    drafts_before: tuple[int, ...] = ()

    @staticmethod
    def words_per_row(vocab_size: int) -> int:
        """Return the number of integers per row."""
        return -(-vocab_size // 32)


class TokenLogprobs(NamedTuple):
    """Log probabilities of the chosen token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RowResult(NamedTuple):
    """Result of one row: its sampled tokens, and possibly an error that ends only this request.

    `token_ids`: empty if the row does not sample, one token if it does, up to 1 + len(drafts) with drafts. After an
    error at some position it holds the tokens sampled before that. `logprobs` has an entry per token if the request
    asked for any. `prompt_logprobs` covers positions start+1 .. start+count within the prompt. `vector`: result of a
    prompt-only request, float32 in little-endian order.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    vector: bytes | None = None


RowResultFields = tuple[
    str,
    tuple[int, ...],
    tuple[TokenLogprobs, ...] | None,
    tuple[TokenLogprobs, ...] | None,
    str | None,
    bytes | None,
]
# Like `new_row`, for the same reason.
new_row_result: Callable[[RowResultFields], RowResult] = partial(tuple.__new__, RowResult)


class HeadDrafts(NamedTuple):
    """Guesses of a draft head: the tokens that follow a row's last output, and the head's probability of each."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(slots=True)
class StepResult:
    """Results in the order of the plan's rows. `duration_s`: wall time of the step as measured by the runner.

    `ahead`: guesses for each row as `StepPlan.ahead` asks for; empty = none for any row.

    `loads_s`, `stores_s`: seconds that the plan's loads and stores took, each on its own; 0 = not measured.
    States count among them.
    `copies_first`: the copies ran before the rows instead of concurrently, so `duration_s` is the sum.
    """

    step: int
    rows: list[RowResult]
    duration_s: float = 0.0
    loads_s: float = 0.0
    stores_s: float = 0.0
    copies_first: bool = False
    ahead: list[HeadDrafts] = field(default_factory=list)
