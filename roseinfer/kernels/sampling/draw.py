"""Drawing of one token per row by inverting the cumulative distribution, without sorting and without waiting.

Weights are 2^((logit - best) * scale), scale = log2(e) / temperature, in float32, so the likeliest token has weight 1.
Masses are sums of weights as 64-bit fixed-point numbers. Integers have the same sum in any order, so a row's token does
not depend on how its vocabulary is cut, nor on the rest of the batch. Weights below 2^-44 are 0, and a token of weight
0 is never drawn.

Filters have the meaning of `roseinfer.runner.draw`, with equally likely tokens ranked by id. They keep all tokens above
some logit, the border, and the first few, by id, of those at the border; `draw_filter` finds both. The distribution
over kept tokens is inverted in the order of token ids, as there.
"""

import torch

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton
from roseinfer.kernels.sampling.argmax import CHUNK_TOKENS, chunk_best, load_chunk, row_best, settle, settle_reference
from roseinfer.kernels.sampling.draw_filter import find_borders
from roseinfer.kernels.sampling.draw_weights import (
    MAX_GREEDY_TEMPERATURE,
    fixed,
    is_filtered,
    row_settings,
    uniform,
    weigh,
    weigh_reference,
)


@triton.jit(do_not_specialize=("seats_ptr",))
def _mass_kernel(
    logits_ptr,
    best_ptr,
    seats_ptr,
    settings_ptr,
    integers_ptr,
    border_ptr,
    mass_ptr,
    tied_ptr,
    vocab_size,
    logits_stride,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write, in program (row, chunk), the chunk's mass above the border [n, chunks], and its number of tokens at it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    best, _token = row_best(best_ptr + row * CHUNKS, CHUNKS, CHUNKS_BLOCK)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    scale, top_p, min_p, top_k, is_random = row_settings(settings_ptr, integers_ptr, seat, best)
    if is_random:
        x = load_chunk(logits_ptr + row * logits_stride, chunk, vocab_size, CHUNK)
        weight = fixed(weigh(x, best, scale, min_p))
        at = row * CHUNKS + chunk
        if FILTERED:
            filtered, _by_count = is_filtered(top_p, top_k, vocab_size, is_random)
            border = tl.load(border_ptr + row, mask=filtered, other=float("-inf"))
            weight = tl.where(x > border, weight, 0)
            tl.store(tied_ptr + at, tl.sum((x == border).to(tl.int32), 0))
        tl.store(mass_ptr + at, tl.sum(weight, 0))


@triton.jit
def _kept_masses(
    row,
    mass_ptr,
    tied_ptr,
    ties,
    tie_weight,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """Return the kept mass of each chunk, and the number of tokens at the border before it."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    mass = tl.load(mass_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
    tied_before = tl.zeros([CHUNKS_BLOCK], tl.int32)
    if FILTERED:
        tied = tl.load(tied_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
        tied_before = tl.cumsum(tied, 0) - tied
        kept = tl.minimum(tl.maximum(ties - tied_before, 0), tied)
        mass += kept.to(tl.int64) * tie_weight
    return mass, tied_before


@triton.jit(do_not_specialize=("seats_ptr", "ends_ptr", "out_ptr"))
def _pick_kernel(
    logits_ptr,
    best_ptr,
    seats_ptr,
    ends_ptr,
    settings_ptr,
    integers_ptr,
    border_ptr,
    ties_ptr,
    mass_ptr,
    tied_ptr,
    token_pool_ptr,
    out_ptr,
    vocab_size,
    logits_stride,
    pool_stride,
    FILTERED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find, in program (row), the chunk in which the target mass is reached, then the token."""
    row = tl.program_id(0).to(tl.int64)
    best, token = row_best(best_ptr + row * CHUNKS, CHUNKS, CHUNKS_BLOCK)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    scale, top_p, min_p, top_k, is_random = row_settings(settings_ptr, integers_ptr, seat, best)
    if is_random:
        border = tl.full([], float("-inf"), tl.float32)
        ties = tl.full([], 0, tl.int32)
        if FILTERED:
            filtered, _by_count = is_filtered(top_p, top_k, vocab_size, is_random)
            border = tl.load(border_ptr + row, mask=filtered, other=float("-inf"))
            ties = tl.load(ties_ptr + row, mask=filtered, other=0)
        tie_weight = fixed(weigh(border, best, scale, min_p))
        mass, tied_before = _kept_masses(row, mass_ptr, tied_ptr, ties, tie_weight, FILTERED, CHUNKS, CHUNKS_BLOCK)
        running = tl.cumsum(mass, 0)
        total = tl.sum(mass, 0)
        index = tl.load(ends_ptr + row).to(tl.int64) - tl.load(integers_ptr + seat * 3 + 1)
        u = uniform(tl.load(integers_ptr + seat * 3), index)
        target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        passed = running <= target
        chunk = tl.sum(passed.to(tl.int32), 0)
        target -= tl.sum(tl.where(passed, mass, 0), 0)
        x = load_chunk(logits_ptr + row * logits_stride, chunk, vocab_size, CHUNK)
        weight = fixed(weigh(x, best, scale, min_p))
        if FILTERED:
            at_border = (x == border).to(tl.int32)
            before = tl.sum(tl.where(tl.arange(0, CHUNKS_BLOCK) == chunk, tied_before, 0), 0)
            rank = before + tl.cumsum(at_border, 0) - at_border
            weight = tl.where((x > border) | ((x == border) & (rank < ties)), weight, 0)
        token = chunk * CHUNK + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    settle(row, token, best, seats_ptr, ends_ptr, token_pool_ptr, pool_stride, out_ptr)


def draw(
    logits: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    settings: torch.Tensor,
    integers: torch.Tensor,
    token_pool: torch.Tensor,
    out: torch.Tensor,
    *,
    filtered: bool,
    chunk: int = CHUNK_TOKENS,
    num_warps: int = 16,
    pick_warps: int = 16,
    **search: int,
) -> None:
    """Draw a token for each row by its seat's settings, and write it like `greedy`, with the same arguments.

    settings: [S, 3] float64: temperature, top_p, min_p. integers: [S, 3] int64: seed, prompt_len, top_k (0: off). The
    random number of a row is `roseinfer.runner.rng.uniforms` of its seed and end - prompt_len. Seats of at most
    MAX_GREEDY_TEMPERATURE take the likeliest token. filtered: whether some row may have top-k or top-p; if not, neither
    is read. search: tuning of `find_borders`.
    """
    rows, vocab_size = logits.shape
    if not rows:
        return
    best = chunk_best(logits, chunk, num_warps)
    chunks = best.shape[1]
    border = ties = tied = None
    if filtered:
        border, ties = find_borders(logits, best, seats, settings, integers, chunk=chunk, num_warps=num_warps, **search)
        tied = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    mass = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    sizing = {"FILTERED": filtered, "CHUNKS": chunks, "CHUNKS_BLOCK": next_power_of_2(chunks), "CHUNK": chunk}
    _mass_kernel[(rows, chunks)](
        logits,
        best,
        seats,
        settings,
        integers,
        border,
        mass,
        tied,
        vocab_size,
        logits.stride(0),
        num_warps=num_warps,
        **sizing,
    )
    _pick_kernel[(rows,)](
        logits,
        best,
        seats,
        ends,
        settings,
        integers,
        border,
        ties,
        mass,
        tied,
        token_pool,
        out,
        vocab_size,
        logits.stride(0),
        token_pool.stride(0),
        num_warps=pick_warps,
        **sizing,
    )


def draw_reference(
    logits: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    settings: torch.Tensor,
    integers: torch.Tensor,
    token_pool: torch.Tensor,
    out: torch.Tensor,
    u: torch.Tensor,
) -> None:
    """`draw` by sorting. u: [n] float64, the random numbers."""
    settings, integers = settings[seats.long()], integers[seats.long()]
    x = logits.float()
    best = x.amax(-1)
    weights = _keep_reference(x, weigh_reference(x, settings), settings[:, 1:2], integers[:, 2:])
    running = weights.cumsum(-1)
    target = (u * running[:, -1]).long()[:, None]
    tokens = (running <= target).sum(-1)
    tokens = torch.where(settings[:, 0] > MAX_GREEDY_TEMPERATURE, tokens, (x == best[:, None]).int().argmax(-1))
    settle_reference(tokens, best, seats, ends, token_pool, out)


def _keep_reference(x: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return weights [n, V] with those of dropped tokens set to 0."""
    order = x.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    rank = torch.arange(x.shape[1], device=x.device)
    ranked = ranked.masked_fill((top_k > 0) & (rank >= top_k), 0)
    running = ranked.cumsum(-1)
    keep = (running - ranked < (top_p * running[:, -1:]).ceil()) | (rank == 0) | (top_p >= 1)
    return torch.zeros_like(weights).scatter_(1, order, ranked.where(keep, 0))
