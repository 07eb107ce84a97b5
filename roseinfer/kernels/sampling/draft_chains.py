"""Chains of drafts on the device: where they begin, inputs of each draft step, and what it has drafted.

A chain is one row's drafts of a step, made one after the other. Neither counts of right drafts nor tokens are known to
the host when it launches the steps. The grids depend on the number of rows only, so that a graph can capture them.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton
from roseinfer.kernels.sampling.draw_weights import MAX_GREEDY_TEMPERATURE

# Columns of `layout`; the row's drafts follow, then -1.
SEAT, FIRST, SAMPLE, END, AHEAD = range(5)
FIELD_COUNT: int = 5
_FIELD_COUNT: tl.constexpr = tl.constexpr(FIELD_COUNT)
_MAX_BLOCK: int = 32_768  # logits of a row at once
_GREEDY_TEMPERATURE: tl.constexpr = tl.constexpr(MAX_GREEDY_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class Chains:
    """State of R chains, and the inputs of their next draft step. int32 but for `tokens`, `positions`, `slots` and
    `ends`, which are int64.

    seats, ahead, made: [R], drafts that are wanted and that are made. next: [R], the position of `tokens`. states: [R,
    hidden], those before the tokens. rows, positions, context_len: [R], and slots: [groups, R], of each KV group, as of
    a `ForwardBatch`; a chain that is complete has the spare seat there. ends: [R], positions of the drafts. drafts: [R,
    M] int64; chances: [R, M] float32.
    """

    seats: torch.Tensor
    ahead: torch.Tensor
    made: torch.Tensor
    next: torch.Tensor
    tokens: torch.Tensor
    states: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    context_len: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    drafts: torch.Tensor
    chances: torch.Tensor

    @classmethod
    def allocate(
        cls, rows: int, most: int, hidden: int, groups: int, dtype: torch.dtype, device: torch.device
    ) -> "Chains":
        """Return R = rows chains of at most `most` drafts, which want none."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        long = torch.int64
        return cls(
            seats=zeros(rows),
            ahead=zeros(rows),
            made=zeros(rows),
            next=zeros(rows),
            tokens=zeros(rows, dtype=long),
            states=zeros(rows, hidden, dtype=dtype),
            rows=zeros(rows),
            positions=zeros(rows, dtype=long),
            context_len=zeros(rows),
            slots=zeros(groups, rows, dtype=long),
            ends=zeros(rows, dtype=long),
            drafts=zeros(rows, most, dtype=long),
            chances=zeros(rows, most, dtype=torch.float32),
        )


def begin_chains(
    layout: torch.Tensor, sampled: torch.Tensor, states: torch.Tensor, last: torch.Tensor, chains: Chains
) -> None:
    """Begin the chains of n rows after the first token that no draft has guessed.

    layout: [n, FIELD_COUNT + d] int32, dense: the row's seat; index of its token before its drafts in `states`; index
    in `sampled` of the sample after that token, and that sample's position; drafts to make; drafts that were verified.
    sampled: [s] int64, negative for a failed sample. states: [T, hidden]. last: [S, hidden], gets the state before each
    row's newest token, by seat.
    """
    n, columns = layout.shape
    begin_chains_kernel[(n,)](
        layout,
        sampled,
        states,
        last,
        chains.seats,
        chains.ahead,
        chains.made,
        chains.next,
        chains.tokens,
        chains.states,
        columns,
        len(sampled),
        DRAFTS=next_power_of_2(max(1, columns - FIELD_COUNT)),
        HIDDEN=states.shape[1],
        BLOCK=next_power_of_2(states.shape[1]),
        num_warps=8,
    )


def prepare_draft_step(chains: Chains, count: int, tables: torch.Tensor, block_size: int, spare: int) -> None:
    """Set the inputs of the next draft step for the first `count` chains.

    tables: [groups, S, B] int32, block tables by seat. spare: the seat of chains that are complete.
    """
    prepare_chains_kernel[(len(tables),)](
        chains.seats,
        chains.ahead,
        chains.made,
        chains.next,
        tables,
        chains.rows,
        chains.positions,
        chains.context_len,
        chains.slots,
        chains.ends,
        count,
        spare,
        tables.stride(0),
        tables.stride(1),
        chains.slots.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=next_power_of_2(count),
        num_warps=4,
    )


def end_draft_step(
    chains: Chains, logits: torch.Tensor, drafted: torch.Tensor, target_ids: torch.Tensor, settings: torch.Tensor
) -> None:
    """Append what a step has drafted to the first n chains that are not complete.

    logits: [n, W]. drafted: [n] int64, indices of its columns, negative for none. target_ids: [W] int64, their tokens.
    settings: [S, 3] float64 by seat, the first of which is the temperature; at most MAX_GREEDY_TEMPERATURE counts as 1.
    A draft's chance is its probability at that temperature, NaN without a finite one.
    """
    n, width = logits.shape
    assert logits.stride(1) == 1
    end_chains_kernel[(n,)](
        chains.seats,
        chains.ahead,
        chains.made,
        chains.next,
        chains.tokens,
        chains.drafts,
        chains.chances,
        logits,
        drafted,
        target_ids,
        settings,
        width,
        logits.stride(0),
        MOST=chains.drafts.shape[1],
        BLOCK=min(_MAX_BLOCK, next_power_of_2(width)),
        num_warps=16,
    )


@triton.jit(do_not_specialize=["columns", "num_samples"])
def begin_chains_kernel(
    layout,
    sampled,
    states,
    last,
    seats,
    ahead,
    made,
    next_position,
    tokens,
    chain_states,
    columns,
    num_samples,
    DRAFTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    fields = layout + row * columns
    seat = tl.load(fields)
    first = tl.load(fields + 1)
    sample = tl.load(fields + 2)
    index = tl.arange(0, DRAFTS)
    draft = tl.load(fields + _FIELD_COUNT + index, mask=index < columns - _FIELD_COUNT, other=-1)
    # A place without a draft counts as wrong, even if a failed sample looks like it.
    found = tl.load(sampled + sample + index, mask=(draft >= 0) & (sample + index < num_samples), other=-1)
    right = tl.min(tl.where((draft >= 0) & (found == draft), DRAFTS, index), 0)
    token = tl.maximum(tl.load(sampled + sample + right), 0)  # a failed row's is negative
    tl.store(seats + row, seat)
    tl.store(ahead + row, tl.load(fields + 4))
    tl.store(made + row, 0)
    tl.store(next_position + row, tl.load(fields + 3) + right)
    tl.store(tokens + row, token)
    part = tl.arange(0, BLOCK)
    state = tl.load(states + (first + right).to(tl.int64) * HIDDEN + part, mask=part < HIDDEN)
    tl.store(chain_states + row.to(tl.int64) * HIDDEN + part, state, mask=part < HIDDEN)
    tl.store(last + seat.to(tl.int64) * HIDDEN + part, state, mask=part < HIDDEN)


@triton.jit(do_not_specialize=["count", "spare"])
def prepare_chains_kernel(
    seats,
    ahead,
    made,
    next_position,
    tables,
    rows,
    positions,
    context_len,
    slots,
    ends,
    count,
    spare,
    group_stride,
    tables_stride,
    slots_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set, in program (group), the slots of a KV group. All programs write the other inputs, which are the same."""
    tables += tl.program_id(0).to(tl.int64) * group_stride
    slots += tl.program_id(0) * slots_stride
    row = tl.arange(0, BLOCK)
    exists = row < count
    active = tl.load(made + row, mask=exists, other=0) < tl.load(ahead + row, mask=exists, other=0)
    seat = tl.where(active, tl.load(seats + row, mask=exists, other=0), spare)
    position = tl.where(active, tl.load(next_position + row, mask=exists, other=0), 0)
    block = tl.load(tables + seat.to(tl.int64) * tables_stride + position // BLOCK_SIZE, mask=exists, other=0)
    tl.store(rows + row, seat, mask=exists)
    tl.store(positions + row, position.to(tl.int64), mask=exists)
    tl.store(context_len + row, position + 1, mask=exists)
    tl.store(slots + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    tl.store(ends + row, position.to(tl.int64) + 1, mask=exists)


@triton.jit(do_not_specialize=["width"])
def end_chains_kernel(
    seats,
    ahead,
    made,
    next_position,
    tokens,
    drafts,
    chances,
    logits,
    drafted,
    target_ids,
    settings,
    width,
    logits_stride,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    done = tl.load(made + row)
    if done < tl.load(ahead + row):
        temperature = tl.load(settings + tl.load(seats + row).to(tl.int64) * 3)
        scale = (1.4426950408889634 / tl.where(temperature > _GREEDY_TEMPERATURE, temperature, 1.0)).to(tl.float32)
        column = tl.maximum(tl.load(drafted + row), 0)
        peak = tl.full([], -1e38, tl.float32)
        total = tl.zeros([], tl.float32)
        for first in range(0, width, BLOCK):
            index = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * logits_stride + index, mask=index < width, other=float("-inf"))
            x = x.to(tl.float32) * scale
            higher = tl.maximum(peak, tl.max(x, 0))
            total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(x - higher), 0)
            peak = higher
        own = tl.load(logits + row * logits_stride + column).to(tl.float32) * scale
        token = tl.load(target_ids + column)
        tl.store(chances + row * MOST + done, tl.exp2(own - peak) / total)
        tl.store(drafts + row * MOST + done, token)
        tl.store(tokens + row, token)
        tl.store(made + row, done + 1)
        tl.store(next_position + row, tl.load(next_position + row) + 1)


# --- references ----------------------------------------------------------------------------------------------------
def begin_chains_reference(
    layout: torch.Tensor, sampled: torch.Tensor, states: torch.Tensor, last: torch.Tensor, chains: Chains
) -> None:
    for row, (seat, first, sample, end, ahead, *drafts) in enumerate(layout.tolist()):
        right = 0
        while right < len(drafts) and 0 <= drafts[right] == int(sampled[sample + right]):
            right += 1
        chains.seats[row], chains.ahead[row], chains.made[row] = seat, ahead, 0
        chains.next[row], chains.tokens[row] = end + right, max(0, int(sampled[sample + right]))
        chains.states[row] = last[seat] = states[first + right]


def prepare_draft_step_reference(chains: Chains, count: int, tables: torch.Tensor, block_size: int, spare: int) -> None:
    active = chains.made[:count] < chains.ahead[:count]
    seat = torch.where(active, chains.seats[:count], spare)
    position = torch.where(active, chains.next[:count], 0).long()
    chains.rows[:count], chains.positions[:count] = seat, position
    chains.context_len[:count], chains.ends[:count] = position + 1, position + 1
    for table, slots in zip(tables, chains.slots, strict=True):
        slots[:count] = table[seat.long(), position // block_size].long() * block_size + position % block_size


def end_draft_step_reference(
    chains: Chains, logits: torch.Tensor, drafted: torch.Tensor, target_ids: torch.Tensor, settings: torch.Tensor
) -> None:
    for row, column in enumerate(drafted.clamp_min(0).tolist()):
        done = int(chains.made[row])
        if done < int(chains.ahead[row]):
            temperature = float(settings[chains.seats[row], 0])
            temperature = temperature if temperature > MAX_GREEDY_TEMPERATURE else 1.0
            chains.chances[row, done] = (logits[row].float() / temperature).softmax(-1)[column]
            chains.drafts[row, done] = chains.tokens[row] = target_ids[column]
            chains.made[row] += 1
            chains.next[row] += 1
