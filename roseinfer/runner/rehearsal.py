"""Artificial steps before the first request, which load kernels and show how much memory a step takes."""

from collections.abc import Sequence

from roseinfer.core.plan import (
    Admission,
    BlockCopy,
    GroupChanges,
    Row,
    SlotChange,
    StateChanges,
    StateSnapshot,
    StepLimits,
    StepPlan,
    TableChange,
    TokenMasks,
)
from roseinfer.core.runner import Runner
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.seats import SeatTable

GREEDY = SequenceParams(max_tokens=2, temperature=0.0)
PLAIN = SequenceParams(max_tokens=2, temperature=1.0)
# Every stage of the draw.
FILTERED = SequenceParams(max_tokens=2, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)
# Float32 logits, and the sampler's edits and log probabilities.
EDITED = SequenceParams(max_tokens=2, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)


def full_step(limits: StepLimits, chunked: bool) -> list[int]:
    """Return lengths of prompts that fill a step to its limits.

    Chunked prompts share it evenly. Otherwise one prompt is as long as possible and the others have one token: the step
    that takes the most memory.
    """
    rows, tokens = limits.max_rows, limits.max_tokens
    if not chunked:
        return [tokens - rows + 1] + [1] * (rows - 1)
    each, longer = divmod(tokens, rows)
    return [each + 1] * longer + [each] * (rows - longer)


def rehearse(
    runner: Runner,
    seats: SeatTable,
    num_blocks: Sequence[int],
    lengths: Sequence[int],
    sampling: tuple[SequenceParams, ...] = (FILTERED, GREEDY),
    *,
    guided: bool = False,
    every_position: bool = False,
    drafts: int = 0,
    ahead: int = 0,
    adapter_slot: int = -1,
) -> None:
    """Prefill prompts of `lengths` tokens in one step, decode a step, copy a block, leave the seats empty.

    num_blocks: of each KV group. Prompts are shortened to fit the context and the first group. In further groups, the
    prompts' tables may name the same blocks, and prompts may share a slot. Seats take the elements of
    `sampling` in turn. `guided`: sample with masks. `every_position`: results need the states of whole prompts.
    `drafts`: as many are verified in the second step, if they fit. `ahead`: drafts that a head makes after each row of
    it, if they fit. `adapter_slot`: of all rows. This overwrites blocks and slots, which must be unused.
    """
    admitted: list[Admission] = []
    prefill: list[Row] = []
    decode: list[Row] = []
    made: list[int] = []
    used, size, left = 0, seats.block_size, drafts
    first_blocks, *window_blocks = num_blocks
    prompts = min(len(lengths), len(seats.seats), first_blocks)
    for seat, wanted in enumerate(lengths[:prompts]):
        others = prompts - seat - 1  # each needs a block
        room = min(seats.max_model_len, (first_blocks - used - others) * size)
        length = min(wanted, room)
        own = min(-(-left // (others + 1)), max(0, room - length - 1))
        left -= own
        blocks = -(-min(length + 1 + own + ahead, room) // size)
        table = tuple(range(used, used + blocks))
        used += blocks
        admitted.append(_admission(seat, length, table, sampling[seat % len(sampling)], adapter_slot))
        prefill.append(_row(seat, 0, length, length if every_position else 1))
        if length < room:
            decode.append(_row(seat, length, 1, drafts=(0,) * own))
            made.append(max(0, min(ahead, room - length - 1 - own)))
    groups = tuple(_same_tables(admitted, blocks) for blocks in window_blocks)
    plan = StepPlan(0, prefill, admitted, num_tokens=sum(row.count for row in prefill), groups=groups)
    plan.states = _states(prompts, seats)
    _run(runner, plan, guided)
    if decode:
        verified = sum(len(row.drafts) for row in decode)
        plan = StepPlan(1, decode, num_tokens=len(decode) + verified, num_drafts=verified)
        plan.ahead = tuple(made) if ahead else ()
        _run(runner, plan, guided)
    # Only a GPU has a kernel to compile for it.
    copies = [_copies(blocks) if seats.device.type == "cuda" else () for blocks in num_blocks]
    groups = tuple(GroupChanges(copies=of_group) for of_group in copies[1:])
    _run(runner, StepPlan(2, [], copies=list(copies[0]), released=list(range(prompts)), groups=groups))


def _same_tables(admitted: Sequence[Admission], num_blocks: int) -> GroupChanges:
    """Return tables as in the first group, within `num_blocks` blocks."""
    tables = [TableChange(one.seat, 0, tuple(block % num_blocks for block in one.blocks)) for one in admitted]
    return GroupChanges(tuple(tables))


def _states(prompts: int, seats: SeatTable) -> StateChanges | None:
    """Return slots for prompts, which may share some, and a snapshot if there is another slot."""
    if seats.states is None:
        return None
    last = seats.states.num_slots - 1
    slots = tuple(SlotChange(seat, seat % max(1, last)) for seat in range(prompts))
    return StateChanges(slots, snapshots=(StateSnapshot(0, 1, last),) if last else ())


def _copies(num_blocks: int) -> tuple[BlockCopy, ...]:
    return (BlockCopy(0, num_blocks - 1, 1),) if num_blocks > 1 else ()


def _admission(seat: int, length: int, table: tuple[int, ...], params: SequenceParams, adapter: int) -> Admission:
    return Admission(f"rehearsal-{seat}", seat, [0] * length, length, params, 0, (), table, adapter_slot=adapter)


def _row(seat: int, start: int, count: int, logits: int = 1, drafts: tuple[int, ...] = ()) -> Row:
    more = len(drafts)
    return Row(f"rehearsal-{seat}", seat, start, count + more, logits + more, True, start, 0, (), drafts)


def _run(runner: Runner, plan: StepPlan, guided: bool = False) -> None:
    masks = None
    if guided:
        plan.guided = tuple(range(len(plan.rows)))
        words = runner.mask_space(len(plan.guided))
        words.cast("B")[:] = b"\xff" * words.nbytes
        masks = TokenMasks(plan.guided, words)
    handle = runner.submit(plan)
    runner.sample(handle, masks)
    runner.collect(handle)
