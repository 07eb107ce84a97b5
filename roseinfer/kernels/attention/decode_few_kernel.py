"""Triton kernels of `decode_few` and `verify_few`."""

from roseinfer.kernels.attention.decode_forms import add_tiles
from roseinfer.kernels.attention.heads import NORM_AFTER, NORM_BEFORE, norm_scale
from roseinfer.kernels.attention.kv_fp8 import narrow_queries, narrowed
from roseinfer.kernels.attention.paged import blocks_of, no_peak, with_sinks
from roseinfer.kernels.common.triton_support import tl, triton

MAX_ROWS: int = 32  # with one query each
MAX_TOKENS: int = 32  # of rows with several queries
MAX_PARTS: int = 32  # per row
# Parts of a row that is not long. A row is long if such parts exceed `_LONG` tiles.
SHORT_ROW_PARTS: int = 16
_PARTS: tl.constexpr = tl.constexpr(SHORT_ROW_PARTS)
_LONG: tl.constexpr = tl.constexpr(4)
_MOST_PARTS: tl.constexpr = tl.constexpr(MAX_PARTS)
_MOST_ROWS: tl.constexpr = tl.constexpr(MAX_ROWS)
_MOST_TOKENS: tl.constexpr = tl.constexpr(MAX_TOKENS)


@triton.jit(do_not_specialize=["slots", "parts", "rows", "budget"])
def few_kernel(
    qkv,
    k_cache,
    v_cache,
    tables,
    table_rows,
    context_len,
    slots,
    query_start,
    queries_cos_sin,
    keys_cos_sin,
    q_weight,
    k_weight,
    k_scales,
    v_scales,
    sinks,
    sums,
    peaks,
    arrived,
    out,
    scale,
    eps,
    parts,
    rows,
    budget,
    qkv_stride,
    block_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MANY: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend for KV head h over part i of row r's context. The new tokens belong to part 0.

    With one query a row this is program (h, r, i). With MANY it is program (h, j), for QUERIES of a row's tokens: j
    counts the tiles of queries of all parts of all rows.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    ROWS: tl.constexpr = max(triton.next_power_of_2(GROUP * QUERIES), 16)
    kv_head = tl.program_id(0)
    # The step's first kernels wrote this and are done: the layer's product, which may still run, started after them.
    if not MANY:
        row = tl.program_id(1)
        part = tl.program_id(2)
        token = row
        first_query = 0
        count = 1
        context = tl.load(context_len + row)
        slot = tl.load(slots + row)
        old = context - (slot >= 0).to(tl.int32)
        least = tl.maximum(tl.cdiv(_tiles_of_all(context_len, TILE, WINDOW), budget), 1)
        first, tiles = _tiles(context, 1, old, TILE, WINDOW)
        length = tl.maximum(tl.cdiv(tiles, tl.minimum(parts, _PARTS)), least)
        if length > _LONG:
            length = tl.maximum(tl.cdiv(tiles, parts), least)
        parts = tl.maximum(tl.cdiv(tiles, length), 1)
    else:
        row, part, tile, parts, length = _part_of(
            query_start, context_len, rows, budget, tl.program_id(1), QUERIES, TILE, WINDOW
        )
        first_query = tile * QUERIES
        exists = row < rows
        token = tl.load(query_start + row, mask=exists, other=0)
        count = tl.load(query_start + row + 1, mask=exists, other=0) - token
        context = tl.load(context_len + row, mask=exists, other=0)
        old = context - count
        first, tiles = _tiles(context, count, old, TILE, WINDOW)
        # Programs without work make room for the next kernels. One has to wait, since the next kernels wait for this
        # one only.
        if (part >= parts) & (tl.program_id(1) > 0):
            return
        row = tl.minimum(row, rows - 1)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    begin = first + part * length
    end = tl.minimum(begin + length, first + tiles)
    place = tl.arange(0, TILE)
    block = blocks_of(table, begin * TILE + place, old, BLOCK_SIZE)
    if not MANY:  # the factors of one token fit registers
        position = context - 1
        q_factors = _factors(q_weight, queries_cos_sin, position, D, D_PAD, NORM, ROTATE, ROTATED, INTERLEAVED, MANY)
        k_factors = _factors(k_weight, keys_cos_sin, position, D, D_PAD, NORM, ROTATE, ROTATED, INTERLEAVED, MANY)
    if OVERLAP:
        _ask(k_cache + kv_head * D, block, begin * TILE + place, block_stride, KV_HEADS * D, D, BLOCK_SIZE)
        _ask(v_cache + kv_head * D, block, begin * TILE + place, block_stride, KV_HEADS * D, D, BLOCK_SIZE)
        tl.extra.cuda.gdc_wait()
    if part >= parts:
        return

    dim = tl.arange(0, D_PAD)
    member = tl.arange(0, ROWS)
    # One token is addressed by scalars: it takes up to a microsecond less than the general form.
    if not MANY:
        head = kv_head * GROUP + member
        real = member < GROUP
        position = context - 1
        qkv += token.to(tl.int64) * qkv_stride
        query_at = head * D
    else:
        head = kv_head * GROUP + member % GROUP
        index = first_query + member // GROUP  # of a query among the row's
        real = (index < count) & (member < QUERIES * GROUP)
        position = tl.minimum(old + index, context - 1)
        query_at = (token + index).to(tl.int64) * qkv_stride + head * D
    if MANY:
        q_factors = _factors(
            q_weight, queries_cos_sin, position, D, D_PAD, NORM, ROTATE, ROTATED, INTERLEAVED, MANY
        )  # fmt: skip
    query = _turned(qkv, query_at, real, q_factors, eps, D, D_PAD, NORM, ROTATE, ROTATED, INTERLEAVED).to(
        qkv.dtype.element_ty
    )
    peak = no_peak(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    v_scale = 1.0
    if FP8:
        query, unit = narrow_queries(query)
        scale *= unit * tl.load(k_scales + kv_head)
        v_scale = tl.load(v_scales + kv_head)
    if part == 0:
        NEW: tl.constexpr = 16 if MANY else 1  # the least that the matrix units take
        new = tl.arange(0, NEW)
        is_token = new < count
        if not MANY:
            to = tl.full([1], 0, tl.int64) + slot
            new_position = position
            key_at = new + (HEADS + kv_head) * D
        else:
            to = tl.load(slots + token + new, mask=is_token, other=-1)
            to = tl.where(first_query == 0, to, -1)  # one tile of queries writes for all
            new_position = tl.minimum(context - count + new, context - 1)
            key_at = (token + new).to(tl.int64) * qkv_stride + (HEADS + kv_head) * D
        if MANY:
            k_factors = _factors(
                k_weight, keys_cos_sin, new_position, D, D_PAD, NORM, ROTATE, ROTATED, INTERLEAVED, MANY
            )  # fmt: skip
        key = _turned(qkv, key_at, is_token, k_factors, eps, D, D_PAD, NORM, ROTATE, ROTATED, INTERLEAVED)
        value_at = qkv + (key_at + KV_HEADS * D)[:, None] + dim[None, :]
        value = tl.load(value_at, mask=is_token[:, None] & (dim < D)[None, :], other=0.0).to(tl.float32)
        kept_at = to // BLOCK_SIZE * block_stride + to % BLOCK_SIZE * (KV_HEADS * D) + kv_head * D
        is_kept = (to >= 0)[:, None] & (dim < D)[None, :]
        key = _kept(k_cache + kept_at[:, None] + dim[None, :], key, is_kept, k_scales, kv_head, FP8)
        value = _kept(v_cache + kept_at[:, None] + dim[None, :], value, is_kept, v_scales, kv_head, FP8)
        if not MANY:
            is_new = to >= 0
            peak = tl.where(is_new, tl.sum(query.to(tl.float32) * key, 1) * scale, peak)
            total += is_new.to(tl.float32)
            acc += tl.where(is_new[:, None], value, 0.0)
        else:
            visible = (new[None, :] <= index[:, None]) & is_token[None, :]
            if WINDOW > 0:
                visible = visible & (new[None, :] > index[:, None] - WINDOW)
            score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
            score = tl.where(visible, score, float("-inf"))
            peak = tl.maximum(peak, tl.max(score, 1))
            weight = tl.exp2(score - peak[:, None])
            total = tl.sum(weight, 1)
            acc = tl.dot(weight.to(query.dtype), value.to(query.dtype), acc, input_precision="ieee")
    seen_from = 0
    own_from = position
    if WINDOW > 0:
        seen_from = tl.maximum(context - count + 1 - WINDOW, 0)
        own_from = position + 1 - WINDOW
    if SKIPS_FIRST:
        seen_from = tl.maximum(seen_from, tl.minimum(1, context - 1))
    peak, total, acc = add_tiles(
        query, k_cache + kv_head * D, v_cache + kv_head * D, table, block, begin, end, seen_from, own_from, old, scale,
        peak, total, acc, block_stride, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, STAGES, FP8, COMPILED,
        MANY,
    )  # fmt: skip
    if SINKS:
        peak, total, acc = with_sinks(sinks, head, real, part == 0, peak, total, acc)
    if FP8:
        acc *= v_scale

    if MANY:
        token += index
    mask = real[:, None] & (dim < D)[None, :]
    if parts == 1:
        target = out + (token * HEADS + head)[:, None] * D + dim[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        at = (token * _MOST_PARTS + part) * HEADS + head
        tl.store(sums + at[:, None] * D + dim[None, :], acc, mask=mask)
        tl.store(peaks + 2 * at, peak, mask=real)
        tl.store(peaks + 2 * at + 1, total, mask=real)
        if not MANY:
            counter = arrived + row * KV_HEADS + kv_head
            # One thread updates the counter: the stores of the other threads must have happened before.
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(counter, 0)
                _merge(sums, peaks, out, row, kv_head, parts, HEADS, GROUP, D, D_PAD, 16)


@triton.jit(do_not_specialize=["rows", "budget"])
def merge_kernel(
    query_start,
    context_len,
    sums,
    peaks,
    out,
    rows,
    budget,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge, in program (h, t), the parts of query head h for token t."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    begin, count, _, parts, _ = _parts_of_all(query_start, context_len, rows, budget, QUERIES, TILE, WINDOW)
    own = (begin <= token) & (token < begin + count)
    parts = tl.sum(tl.where(own, parts, 0), 0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if parts > 1:
        _merge(sums, peaks, out, token, tl.program_id(0), parts, HEADS, 1, D, D_PAD, _MOST_PARTS)


@triton.jit
def _tiles(context, count, old, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first of the tiles that any of the last `count` tokens sees before `old`, and their number."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - count + 1 - WINDOW, 0) // TILE
    return first, tl.maximum(tl.cdiv(old, TILE) - first, 0)


@triton.jit
def _part_length(tiles, short_parts, parts, least):
    """Return the length of a row's parts in tiles. All rows together have about as many parts as run at once: a long
    row gets many, and few programs are left waiting.
    """
    length = tl.maximum(tl.cdiv(tiles, short_parts), least)
    return tl.where(length > _LONG, tl.maximum(tl.cdiv(tiles, parts), least), length)


@triton.jit
def _parts_of_all(
    query_start, context_len, rows, budget, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr
):
    """Return each row's first token, and its numbers of tokens, tiles of queries, parts, and tiles in a part."""
    row = tl.arange(0, _MOST_TOKENS)
    exists = row < rows
    begin = tl.load(query_start + row, mask=exists, other=0)
    count = tl.load(query_start + row + 1, mask=exists, other=0) - begin
    context = tl.load(context_len + row, mask=exists & (count > 0), other=0)
    _, tiles = _tiles(context, count, context - count, TILE, WINDOW)
    query_tiles = tl.cdiv(count, QUERIES)
    least = tl.maximum(tl.cdiv(tl.sum(tiles * query_tiles, 0), budget), 1)
    length = _part_length(tiles, _PARTS, _MOST_PARTS, least)
    return begin, count, query_tiles, tl.where(count > 0, tl.maximum(tl.cdiv(tiles, length), 1), 0), length


@triton.jit
def _part_of(
    query_start, context_len, rows, budget, program, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr
):
    """Return the row of a program (`rows` or more for none), its part and tile of queries, and the number and length of
    the row's parts.
    """
    _, _, query_tiles, parts, length = _parts_of_all(query_start, context_len, rows, budget, QUERIES, TILE, WINDOW)
    ends = tl.cumsum(parts * query_tiles, 0)
    row = tl.sum((ends <= program).to(tl.int32), 0)
    own = tl.arange(0, _MOST_TOKENS) == row
    index = program - tl.sum(tl.where(own, ends - parts * query_tiles, 0), 0)
    tiles = tl.maximum(tl.sum(tl.where(own, query_tiles, 0), 0), 1)
    parts, length = tl.sum(tl.where(own, parts, 0), 0), tl.sum(tl.where(own, length, 0), 0)
    return row, tl.where(row < rows, index // tiles, 0), index % tiles, parts, length


@triton.jit
def _tiles_of_all(context_len, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return about the number of tiles of all rows of a launch with one query a row."""
    row = tl.arange(0, _MOST_ROWS)
    lengths = tl.load(context_len + row, mask=row < tl.num_programs(1), other=0)
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW)
    return tl.sum(tl.cdiv(lengths, TILE), 0)


@triton.jit
def _ask(
    head, block, position, block_stride, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Request the keys or values of some tokens into the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // head.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(D, LINE))) * LINE
    offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * TOKEN_STRIDE
    where = (head + offset[:, None] + tl.minimum(line, D - 1)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _factors(
    weight_ptr, angles, position, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Return what `_turned` multiplies heads by: weights of their numbers and of those that rotate with them, cosines
    and signed sines. They are older than the step's kernels.

    position: of each head's token with MANY; otherwise one number for all.
    """
    dim = tl.arange(0, D_PAD)
    inside = dim < D
    weight, partner_weight, cos, sin = 1.0, 1.0, 1.0, 0.0
    if NORM > 0:
        weight = tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ROTATE:
        partner, angle, sign = _pair_of(dim, D, ROTATED, INTERLEAVED)
        if NORM == NORM_BEFORE:
            partner_weight = tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
        if MANY:
            turn = angles + (position * D)[:, None] + angle[None, :]
            cos = tl.load(turn, mask=inside[None, :], other=0.0)
            sin = tl.load(turn + D // 2, mask=inside[None, :], other=0.0) * sign[None, :]
        else:  # as lines of two dimensions, angles would change their layout in shared memory
            turn = angles + position * D + angle
            cos = tl.load(turn, mask=inside, other=0.0)[None, :]
            sin = (tl.load(turn + D // 2, mask=inside, other=0.0) * sign)[None, :]
    return weight, partner_weight, cos, sin


@triton.jit
def _turned(
    base, at, real, factors, eps, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return the heads at base + at, [rows, D_PAD] float32, normalised and rotated as asked (see `heads`)."""
    dim = tl.arange(0, D_PAD)
    weight, partner_weight, cos, sin = factors
    mask = real[:, None] & (dim < D)[None, :]
    at = base + at[:, None]
    x = tl.load(at + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        partner, _, _ = _pair_of(dim, D, ROTATED, INTERLEAVED)
        y = tl.load(at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM == NORM_BEFORE:
        scale = norm_scale(tl.sum(x * x, 1), D, eps)
        x *= scale * weight
        if ROTATE:
            y *= scale * partner_weight
    if ROTATE:
        x = x * cos + y * sin
    if NORM == NORM_AFTER:
        x *= norm_scale(tl.sum(x * x, 1), D, eps) * weight
    return x


@triton.jit
def _pair_of(dim, D: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the number that rotates with number `dim` of a head, the index of their angle and the sign of its sine.
    A number that is not rotated has an angle of 0.
    """
    HALF: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        partner = dim ^ 1
        angle = dim // 2
        sign = tl.where(dim % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
        angle = tl.where(dim < HALF, dim, dim - HALF)
        sign = tl.where(dim < HALF, -1.0, 1.0)
    if ROTATED < D:
        partner = tl.where(dim < ROTATED, partner, dim)
        angle = tl.where(dim < ROTATED, angle, HALF)
    return partner, angle, sign


@triton.jit
def _kept(at, x, mask, scales, kv_head, FP8: tl.constexpr):
    """Store x in the cache, and return it as the cache holds it, in float32."""
    if FP8:
        kept = narrowed(x, tl.load(scales + kv_head))
    else:
        kept = x.to(at.dtype.element_ty)
    tl.store(at, kept, mask=mask)
    return kept.to(tl.float32)


@triton.jit
def _merge(
    sums, peaks, out, token, kv_head, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, MOST_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write the result of merging all parts of a token (with one query a row: a row) and KV head."""
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = max(1, min(MOST_AT_ONCE, 64 // ROWS))  # as many as fit registers
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    head = kv_head * GROUP + member
    peak = no_peak(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        real = (part < parts)[:, None] & (member < GROUP)[None, :]
        at = ((token * _MOST_PARTS + part) * HEADS)[:, None] + head[None, :]
        # Bypass the L1 cache, which may hold an earlier layer's data.
        peaks_of = tl.load(peaks + 2 * at, mask=real, other=-1e38, cache_modifier=".cg")
        totals = tl.load(peaks + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
        mask = real[:, :, None] & (dim < D)[None, None, :]
        accs = tl.load(sums + at[:, :, None] * D + dim[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(peaks_of, 0))
        fade = tl.exp2(peak - higher)
        weight = tl.exp2(peaks_of - higher[None, :])
        total = total * fade + tl.sum(totals * weight, 0)
        acc = acc * fade[:, None] + tl.sum(accs * weight[:, :, None], 0)
        peak = higher
    merged = acc / tl.where(member < GROUP, total, 1.0)[:, None]
    target = out + (token * HEADS + head)[:, None] * D + dim[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=(member < GROUP)[:, None] & (dim < D)[None, :])
