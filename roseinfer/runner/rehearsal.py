"""Steps that nobody asked for: they load kernels before the first request, and show how much memory a step takes."""

from roseinfer.core.plan import Admission, BlockCopy, Row, StepPlan
from roseinfer.core.sampling import SamplingParams
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.seats import SeatTable

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
PLAIN = SamplingParams(max_tokens=2, temperature=1.0)
# Goes through every stage of the draw.
FILTERED = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)
# Needs its logits in float32, and more of the sampler around the choice.
EDITED = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)


def rehearse(
    runner: ModelRunner,
    seats: SeatTable,
    num_blocks: int,
    rows: int,
    tokens: int,
    sampling: tuple[SamplingParams, ...] = (FILTERED, GREEDY),
) -> None:
    """Prefill about `tokens` tokens in at most `rows` prompts, decode a step, copy a block, leave the seats empty.

    Seats take the elements of `sampling` in turn. Overwrites KV blocks from 0 on: nothing may own them yet.
    """
    rows = min(rows, len(seats.seats), num_blocks)
    room = min(seats.max_model_len, num_blocks // rows * seats.block_size)
    length = max(1, min(tokens // rows, room - 1))
    blocks_each = -(-min(length + 1, room) // seats.block_size)
    admitted = [_admission(seat, length, blocks_each, sampling[seat % len(sampling)]) for seat in range(rows)]
    prefill = [_row(seat, 0, length) for seat in range(rows)]
    _run(runner, StepPlan(0, prefill, admitted, num_tokens=rows * length))
    if length < room:
        decode = [_row(seat, length, 1) for seat in range(rows)]
        _run(runner, StepPlan(1, decode, num_tokens=rows))
    # Only a GPU has a kernel for it to compile.
    copies = [BlockCopy(0, num_blocks - 1, 1)] if num_blocks > 1 and seats.device.type == "cuda" else []
    _run(runner, StepPlan(2, [], copies=copies, released=list(range(rows))))


def _admission(seat: int, length: int, blocks: int, params: SamplingParams) -> Admission:
    table = tuple(range(seat * blocks, (seat + 1) * blocks))
    return Admission(f"rehearsal-{seat}", seat, [0] * length, length, params, 0, (), table)


def _row(seat: int, start: int, count: int) -> Row:
    return Row(f"rehearsal-{seat}", seat, start, count, 1, True, start, 0, ())


def _run(runner: ModelRunner, plan: StepPlan) -> None:
    handle = runner.submit(plan)
    runner.sample(handle)
    runner.collect(handle)
