"""Forms in which `decode_attention` computes one KV head's part of a row: queries over some tiles of its tokens.

q: the group's queries. k_head, v_head: that head of block 0. block: of the tokens in tile `begin`. scale: of scores,
including log2(e). Tokens before `seen_from`, or from `context` on, are not attended to. A form returns the peak of the
scores [heads], the sum of the weights relative to it [heads] and the weighted sum of values [heads, D_PAD], all
float32, with padded heads.
"""

from roseinfer.kernels.attention.kv_fp8 import narrow_queries, widened_values
from roseinfer.kernels.attention.paged import blocks_of, load_tokens, no_peak
from roseinfer.kernels.common.triton_support import tl, triton


@triton.jit
def attend_elementwise(
    q, k_head, v_head, table, block, begin, end, seen_from, context, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend for one query head without matrix units: each place in a tile has sums of its own, merged at the end."""
    dim = tl.arange(0, D_PAD)
    query = tl.load(q + dim, mask=dim < D, other=0.0).to(tl.float32) * scale
    place = tl.arange(0, TILE)
    peaks = no_peak(TILE)
    totals = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, D_PAD], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        position = tile * TILE + place
        inside = position < context
        if WINDOW > 0:
            inside = inside & (position >= seen_from)
        offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * TOKEN_STRIDE
        block = blocks_of(table, position + TILE, context, BLOCK_SIZE)
        k = load_tokens(k_head, offset, inside, D, D_PAD).to(tl.float32)
        v = load_tokens(v_head, offset, inside, D, D_PAD).to(tl.float32)
        score = tl.where(inside, tl.sum(k * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peaks, score)
        fade = tl.exp2(peaks - higher)
        weight = tl.exp2(score - higher)
        totals = totals * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * v
        peaks = higher
    peak = tl.max(peaks, 0)
    fade = tl.exp2(peaks - peak)
    total = tl.sum(totals * fade, 0)
    acc = tl.sum(acc * fade[:, None], 0)
    one = tl.zeros([1], tl.float32)
    return one + peak, one + total, acc[None, :]


@triton.jit
def attend_matrix(
    q, k_head, v_head, table, block, begin, end, seen_from, context, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute scores [heads, tokens] on the matrix units, the heads of a group padded to 16."""
    ROWS: tl.constexpr = max(triton.next_power_of_2(GROUP), 16)
    query = _load_group(q, GROUP, ROWS, D, D_PAD)
    if FP8:
        query, unit = narrow_queries(query)
        scale *= unit
    peak = no_peak(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    return add_tiles(
        query, k_head, v_head, table, block, begin, end, seen_from, seen_from, context, scale, peak, total, acc,
        block_stride, TOKEN_STRIDE, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, STAGES, FP8, COMPILED, False,
    )  # fmt: skip


@triton.jit
def add_tiles(
    query, k_head, v_head, table, block, begin, end, seen_from, own_from, context, scale, peak, total, acc,
    block_stride, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, COMPILED: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """Add these tiles to `peak`, `total` and `acc`. query: [heads, D_PAD], for codes from `narrow_queries`.

    MANY: of several tokens, each of which sees its own window, from `own_from` [heads] on.
    """
    place = tl.arange(0, TILE)
    for tile in tl.range(begin, end, num_stages=STAGES):
        position = tile * TILE + place
        inside = position < context
        if WINDOW > 0:
            inside = inside & (position >= seen_from)
        offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * TOKEN_STRIDE
        block = blocks_of(table, position + TILE, context, BLOCK_SIZE)
        k = load_tokens(k_head, offset, inside, D, D_PAD)
        if FP8:
            k = k.to(query.dtype)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        if MANY and WINDOW > 0:
            score = tl.where(position[None, :] >= own_from[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        fade = tl.exp2(peak - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(weight, 1)
        v = load_tokens(v_head, offset, inside, D, D_PAD)
        if FP8:
            v = widened_values(v, k, COMPILED)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = higher
    return peak, total, acc


@triton.jit
def attend_tokens(
    q, k_head, v_head, table, block, begin, end, seen_from, context, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Compute scores [tokens, heads] on the matrix units, the heads of a group padded to 8."""
    ROWS: tl.constexpr = max(triton.next_power_of_2(GROUP), 8)
    query = _load_group(q, GROUP, ROWS, D, D_PAD)
    if FP8:
        query, unit = narrow_queries(query)
        scale *= unit
    query = tl.trans(query)
    place = tl.arange(0, TILE)
    peak = no_peak(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([D_PAD, ROWS], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        position = tile * TILE + place
        inside = position < context
        if WINDOW > 0:
            inside = inside & (position >= seen_from)
        offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * TOKEN_STRIDE
        block = blocks_of(table, position + TILE, context, BLOCK_SIZE)
        k = load_tokens(k_head, offset, inside, D, D_PAD)
        if FP8:
            k = k.to(query.dtype)
        score = tl.dot(k, query, input_precision="ieee") * scale
        score = tl.where(inside[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 0))
        fade = tl.exp2(peak - higher)
        weight = tl.exp2(score - higher[None, :])
        total = total * fade + tl.sum(weight, 0)
        v = load_tokens(v_head, offset, inside, D, D_PAD)
        if FP8:
            v = widened_values(v, k, COMPILED)
        acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc * fade[None, :], input_precision="ieee")
        peak = higher
    return peak, total, tl.trans(acc)


@triton.jit
def _load_group(q, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load a group's queries [ROWS, D_PAD], padded with zeros."""
    head = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    mask = (head < GROUP)[:, None] & (dim < D)[None, :]
    return tl.load(q + head[:, None] * D + dim[None, :], mask=mask, other=0.0)
