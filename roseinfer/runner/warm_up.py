"""Warm-up of an assembled runner: rehearsals load all kernels before the first request."""

from collections.abc import Sequence

from roseinfer.core.plan import StepLimits
from roseinfer.runner.assembly import Assembly, Shape
from roseinfer.runner.host_copies import CopyTimes, time_copies
from roseinfer.runner.rehearsal import EDITED, FILTERED, GREEDY, PLAIN, full_step, rehearse

# A rehearsal on a CPU only loads what is loaded lazily; a full prefill would take seconds.
CPU_REHEARSAL_TOKENS = 32


def warm_up(assembly: Assembly, shape: Shape, *, chunked: bool) -> CopyTimes:
    """Rehearse steps, and return the times of copies between device and host. `chunked`: prompts may be in chunks."""
    runner, seats, blocks, limits = assembly.runner, assembly.seats, shape.all_blocks, shape.limits
    on_cpu = seats.device.type == "cpu"
    small = StepLimits(min(2, limits.max_rows), min(CPU_REHEARSAL_TOKENS, limits.max_tokens))
    slots = (-1,) if shape.adapters is None else (-1, 0)
    for slot in slots:
        rehearse_whole(assembly, shape, full_step(small if on_cpu else limits, chunked), slot)
    if not on_cpu:  # products of few rows use separate kernels
        for few in (1, 2, 4, 8, 16):
            for slot in slots:
                rehearse(runner, seats, blocks, [min(few, limits.max_tokens)], adapter_slot=slot)
        for params in () if shape.pooling else (PLAIN, EDITED):  # masks apply to logits of either dtype
            rehearse(runner, seats, blocks, [1], (params,), guided=True)
    if assembly.copier is None:
        return CopyTimes()
    return time_copies(assembly.copier, shape.num_blocks, shape.num_host_blocks)


def warm_up_graphs(assembly: Assembly, shape: Shape) -> None:
    """Rehearse steps of a runner that has captured its graphs."""
    limits = shape.limits
    pair = full_step(StepLimits(min(2, limits.max_rows), min(8, limits.max_tokens)), chunked=True)
    for params in (GREEDY, PLAIN, FILTERED, EDITED):
        rehearse(assembly.runner, assembly.seats, shape.all_blocks, pair, (params,))


def rehearse_whole(assembly: Assembly, shape: Shape, lengths: Sequence[int], adapter_slot: int) -> None:
    """Rehearse prompts of these lengths with all that their rows may ask for: every position, or drafts.

    adapter_slot: of all rows, -1 for none.
    """
    limits, pooling = shape.limits, shape.pooling
    drafts = min(limits.max_drafts, limits.max_tokens - len(lengths))
    if assembly.seats.device.type == "cpu":
        drafts = min(drafts, len(lengths))
    rehearse(
        assembly.runner,
        assembly.seats,
        shape.all_blocks,
        lengths,
        every_position=pooling is not None and pooling.method.needs_every_position,
        drafts=drafts,
        ahead=shape.max_ahead,
        adapter_slot=adapter_slot,
    )
