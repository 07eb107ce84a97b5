"""Last step of finding a border (see `draw_filter`): bisection on the bits of gathered logits, by exact sums."""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.sampling.argmax import ordered, row_best
from roseinfer.kernels.sampling.draw_weights import fixed, is_filtered, row_settings, weigh


@triton.jit
def _measure(
    tokens_ptr,
    count,
    key,
    best,
    scale,
    min_p,
    BY_COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the exact measure of tokens above a key, and the largest logit not above it."""
    measure = tl.zeros([TILE], tl.int64)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(tokens_ptr + at, mask=at < count, other=float("-inf")).to(tl.float32) + 0.0
        above = (ordered(x) >> SHIFT) > key
        if BY_COUNT:
            measure += above.to(tl.int64)
        else:
            measure += tl.where(above, fixed(weigh(x, best, scale, min_p)), 0)
        largest = tl.maximum(largest, tl.where(above, float("-inf"), x))
    return tl.sum(measure, 0), tl.max(largest, 0)


@triton.jit
def _search(
    tokens_ptr,
    count,
    target,
    base,
    low,
    high,
    best,
    scale,
    min_p,
    BY_COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the border among tokens whose measure comes on top of `base`, and the measure above it.

    low, high: int64 keys; the measure above `high` is below the target, the border is above `low`.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        measure, _largest = _measure(tokens_ptr, count, middle.to(tl.int32), best, scale, min_p, BY_COUNT, SHIFT, TILE)
        if base + measure < target:
            high = middle
        else:
            low = middle
    measure, border = _measure(tokens_ptr, count, high.to(tl.int32), best, scale, min_p, BY_COUNT, SHIFT, TILE)
    return border, base + measure


@triton.jit(do_not_specialize=("seats_ptr",))
def finish_kernel(
    logits_ptr,
    best_ptr,
    seats_ptr,
    settings_ptr,
    integers_ptr,
    sizes_ptr,
    bounds_ptr,
    masses_ptr,
    gathered_ptr,
    border_ptr,
    ties_ptr,
    vocab_size,
    logits_stride,
    CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write, in program (row), the border [n] float32 and the number of kept tokens at it [n] int32.

    SHIFT: low bits of a float32 that are 0 in every logit of this type; keys are compared without them.
    """
    row = tl.program_id(0).to(tl.int64)
    best, _token = row_best(best_ptr + row * CHUNKS, CHUNKS, CHUNKS_BLOCK)
    seat = tl.load(seats_ptr + row).to(tl.int64)
    scale, top_p, min_p, top_k, is_random = row_settings(settings_ptr, integers_ptr, seat, best)
    filtered, by_count = is_filtered(top_p, top_k, vocab_size, is_random)
    if filtered:
        chunk = tl.arange(0, CHUNKS_BLOCK)
        at = masses_ptr + (row * CHUNKS + chunk) * 3
        base = tl.sum(tl.load(at, mask=chunk < CHUNKS, other=0), 0)
        inside = tl.sum(tl.load(at + 1, mask=chunk < CHUNKS, other=0), 0)
        total = tl.sum(tl.load(at + 2, mask=chunk < CHUNKS, other=0), 0)
        low = (ordered(tl.load(bounds_ptr + row * 2)) >> SHIFT).to(tl.int64) - 1
        high = (ordered(tl.load(bounds_ptr + row * 2 + 1)) >> SHIFT).to(tl.int64)
        count = tl.load(sizes_ptr + row)
        tokens_ptr = gathered_ptr + row * CAPACITY
        if by_count:
            base = tl.zeros([], tl.int64)
            inside = count.to(tl.int64)
            target = top_k
        else:
            target = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        missed = (count > CAPACITY) | (base >= target) | (base + inside < target)
        best_key = (ordered(best) >> SHIFT).to(tl.int64)
        if missed:
            base = tl.zeros([], tl.int64)
            count = vocab_size
            tokens_ptr = logits_ptr + row * logits_stride
            low = (ordered(tl.full([], float("-inf"), tl.float32)) >> SHIFT).to(tl.int64)
            high = best_key
            if by_count:
                finite, _largest = _measure(tokens_ptr, count, low.to(tl.int32), best, scale, min_p, True, SHIFT, TILE)
                target = tl.minimum(target, finite)
        border = best
        ties = target
        if by_count:
            border, above = _search(tokens_ptr, count, target, base, low, high, best, scale, min_p, True, SHIFT, TILE)
            ties = target - above
            low = (ordered(border) >> SHIFT).to(tl.int64) - 1
            high = best_key
            mass, _largest = _measure(tokens_ptr, count, (low + 1).to(tl.int32), best, scale, min_p, False, SHIFT, TILE)
            mass += ties * fixed(weigh(border, best, scale, min_p))
            target = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
        if top_p < 1.0:
            smallest = border
            border, above = _search(tokens_ptr, count, target, base, low, high, best, scale, min_p, False, SHIFT, TILE)
            weight = tl.maximum(fixed(weigh(border, best, scale, min_p)), 1)
            wanted = tl.maximum((target - above + weight - 1) // weight, 1)
            ties = tl.where(by_count & (border == smallest), tl.minimum(ties, wanted), wanted)
        tl.store(border_ptr + row, border)
        tl.store(ties_ptr + row, tl.minimum(ties, vocab_size).to(tl.int32))
