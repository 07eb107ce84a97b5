"""Causal attention of prompt chunks on Hopper: pages are copied in bulk, and products overlap with the softmax.

The design follows FlashAttention 3 (Shah et al., 2024). Two warps of a program copy pages of K and of V into shared
memory by the GPU's copy engine, ahead of two groups of four warps. Each group attends for half of a block's queries. A
group starts the product for a tile's scores and the product that adds the previous tile to its sums, and computes the
tile's weights while the second one runs. One program per multiprocessor takes block after block, so that the next
block's data is copied before the current one ends.

Results and map of blocks are those of `prefill_attention` with tiles of `BLOCK_M`.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.attention.paged import LOG2_E
from roseinfer.kernels.attention.prefill_shares import IN_BULK
from roseinfer.kernels.common.availability import has_large_steps, multiprocessors
from roseinfer.kernels.common.gluon_support import HAS_GLUON, BulkDescriptor, gl, gluon, hopper
from roseinfer.kernels.common.shared_tiles import clear_rows

mbarrier, tma = hopper.mbarrier, hopper.tma

# (query, head) pairs of a program, half of them for each group of warps; keys of a tile; tiles in shared memory.
BLOCK_M, BLOCK_N, STAGES = 128, 64, 4
# Columns of a tile that the copy engine takes at a time: 128 bytes, which it swizzles.
COPIED_COLUMNS = 64
_IN_BULK: gl.constexpr = gl.constexpr(IN_BULK)
_LOG2_E: gl.constexpr = gl.constexpr(LOG2_E)
_TILE = gl.NVMMASharedLayout(2 * COPIED_COLUMNS, 16, 2)
_QUERIES = gl.NVMMASharedLayout(2 * COPIED_COLUMNS, 16, 3)


@dataclass(frozen=True, slots=True)
class BulkPages:
    """A layer's pages for the copy engine. block_rows: rows of [tokens, kv_heads * D] from block to block."""

    k: "BulkDescriptor"
    v: "BulkDescriptor"
    block_rows: int

    @classmethod
    def of(cls, k_cache: torch.Tensor, v_cache: torch.Tensor) -> "BulkPages":
        """k_cache, v_cache: [num_blocks, block_size, kv_heads, D], dense except for the distance of blocks."""
        return cls(_pages(k_cache), _pages(v_cache), _block_rows(k_cache))


def bulk_supports(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if the kernel supports such layers on this device, without windows."""
    fits = (BLOCK_M // 2) % (heads // kv_heads) == 0 and BLOCK_N % block_size == 0 and block_size % 8 == 0
    return HAS_GLUON and fits and head_dim in (64, 128) and dtype == torch.bfloat16 and has_large_steps(device)


def prefill_bulk(
    q: torch.Tensor,
    pages: BulkPages,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    block_map: torch.Tensor,
    scale: float,
    block_size: int,
    programs: int | None = None,
    sinks: torch.Tensor | None = None,
    *,
    in_order: bool = False,
) -> None:
    """Attend like `prefill_attention`, for blocks with parts `IN_BULK` in a map of blocks of `BLOCK_M`.

    q: [T, heads, D], heads dense, tokens a multiple of 8 elements apart; the other arguments as there. programs: the
    most, one per multiprocessor; default: all. sinks: [heads] float32. in_order: a context's pages are consecutive from
    the page in its blocks' part of the map, and there are no block tables.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = pages.k.shape[1] // head_dim
    group = heads // kv_heads
    queries = BulkDescriptor(
        q, list(q.shape), list(q.stride()), [BLOCK_M // 2 // group, group, COPIED_COLUMNS], _QUERIES
    )
    items = kv_heads * block_map.shape[0]
    _bulk_kernel[(min(items, programs or multiprocessors(q.device)),)](
        queries,
        pages.k,
        pages.v,
        tables,
        table_rows,
        query_start,
        context_len,
        out,
        block_map,
        out if sinks is None else sinks,
        items,
        scale * LOG2_E,
        tables.stride(0),
        pages.block_rows,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        IN_ORDER=in_order,
        SINKS=sinks is not None,
        num_warps=4,
    )


def _block_rows(cache: torch.Tensor) -> int:
    return cache.stride(0) // (cache.shape[2] * cache.shape[3])


def _pages(cache: torch.Tensor) -> "BulkDescriptor":
    """Return the descriptor of `COPIED_COLUMNS` of a head for a page's tokens, in [tokens, kv_heads * D]."""
    num_blocks, block_size, kv_heads, head_dim = cache.shape
    width = kv_heads * head_dim
    rows = (num_blocks - 1) * _block_rows(cache) + block_size
    return BulkDescriptor.from_tensor(cache.as_strided((rows, width), (width, 1)), [block_size, COPIED_COLUMNS], _TILE)


@gluon.jit
def _item(block_map, query_start, context_len, program, programs, wave, items, KV_HEADS, QUERIES, BLOCK_N):
    """Return the program's work in a wave: a KV head's part of a block. `tiles` is 0 without work.

    Blocks come longest first, and every second wave in reverse, so that all programs end at about the same time.
    """
    place = wave * programs + program
    if wave % 2 == 1:
        place = wave * programs + programs - 1 - program
    entry = place // KV_HEADS
    head = place % KV_HEADS
    row = gl.load(block_map + 4 * entry, mask=place < items, other=-1)
    first = gl.load(block_map + 4 * entry + 1, mask=place < items, other=0)
    page = gl.load(block_map + 4 * entry + 2, mask=place < items, other=0)
    parts = gl.load(block_map + 4 * entry + 3, mask=place < items, other=-1)
    real = (row >= 0) & (parts == _IN_BULK)
    begin = gl.load(query_start + row, mask=real, other=0)
    count = gl.load(query_start + row + 1, mask=real, other=0) - begin
    context = gl.load(context_len + row, mask=real, other=0)
    position = context - count + first
    tiles = gl.where(real, (gl.minimum(position + QUERIES, context) + BLOCK_N - 1) // BLOCK_N, 0)
    return row, page, first, head, begin, count, context, position, tiles


@gluon.jit
def _copy(
    IS_V: gl.constexpr, queries, pages, tables, table_rows, query_start, context_len, block_map, items, table_stride,
    block_rows, q_smem, smem, full, empty, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    IN_ORDER: gl.constexpr,
):  # fmt: skip
    """Run a warp that copies tiles of K, and first each block's queries; or one that copies tiles of V."""
    PAGES: gl.constexpr = BLOCK_N // BLOCK_SIZE
    PARTS: gl.constexpr = D // 64
    HALF: gl.constexpr = BLOCK_M // 2 // GROUP
    COLUMN_TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    QUERY_TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    # Shared memory holds columns 0 to 63 of all tokens of a tile, then the other columns: a page's rows are together.
    places = smem._reinterpret(smem.dtype, [STAGES * PARTS * PAGES, BLOCK_SIZE, 64], COLUMN_TILE)
    q_places = q_smem._reinterpret(smem.dtype, [4 * PARTS, HALF, GROUP, 64], QUERY_TILE)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    done = 0
    blocks_done = 0
    for wave in range((items + programs - 1) // programs):
        row, first_page, first, head, begin, _count, context, _position, tiles = _item(
            block_map, query_start, context_len, program, programs, wave, items, KV_HEADS, BLOCK_M // GROUP, BLOCK_N
        )
        if IS_V == 0:  # noqa: SIM102 (one is known when it is compiled, the other is not)
            if tiles > 0:
                buffer = blocks_done % 2
                mbarrier.wait(empty.index(2 * STAGES + buffer), ((blocks_done // 2) & 1) ^ 1)
                mbarrier.expect(full.index(2 * STAGES + buffer), BLOCK_M * D * 2)
                for half in gl.static_range(2):
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            queries, [begin + first + half * HALF, head * GROUP, 64 * part],
                            full.index(2 * STAGES + buffer), q_places.index((buffer * 2 + half) * PARTS + part),
                        )  # fmt: skip
                blocks_done += 1
        table = tables
        if not IN_ORDER:
            table += gl.load(table_rows + row, mask=row >= 0, other=0).to(gl.int64) * table_stride
        last = (context - 1) // BLOCK_SIZE
        for back in range(tiles):
            tile = tiles - 1 - back
            stage = done % STAGES
            rows = ()
            for page in gl.static_range(PAGES):
                number = gl.minimum(tile * PAGES + page, last)
                number = first_page + number if IN_ORDER else gl.load(table + number)
                rows = rows + (number * block_rows,)  # noqa: RUF005
            mbarrier.wait(empty.index(IS_V * STAGES + stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(IS_V * STAGES + stage), BLOCK_N * D * 2)
            for page in gl.static_range(PAGES):
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        pages, [rows[page], head * D + 64 * part],
                        full.index(IS_V * STAGES + stage), places.index((stage * PARTS + part) * PAGES + page),
                    )  # fmt: skip
            done += 1


@gluon.jit
def _attend(
    HALF: gl.constexpr, out, query_start, context_len, block_map, sinks, items, scale, q_smem, k_smem, v_smem, full,
    empty, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Run a group of warps for its half of a block's queries. Tiles are taken from the last, masked one down."""
    ROWS: gl.constexpr = BLOCK_M // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    done = 0
    blocks_done = 0
    # Load the next block's numbers while this block is computed.
    _row, _page, n_first, n_head, n_begin, n_count, n_context, n_position, n_tiles = _item(
        block_map, query_start, context_len, program, programs, 0, items, KV_HEADS, BLOCK_M // GROUP, BLOCK_N
    )
    for wave in range((items + programs - 1) // programs):
        first, head, begin, count, context = n_first, n_head, n_begin, n_count, n_context
        first_position, tiles = n_position, n_tiles
        _row, _page, n_first, n_head, n_begin, n_count, n_context, n_position, n_tiles = _item(
            block_map, query_start, context_len, program, programs, wave + 1, items, KV_HEADS, BLOCK_M // GROUP, BLOCK_N
        )
        if tiles > 0:
            buffer = blocks_done % 2
            stage = done % STAGES
            queries = q_smem.index(buffer * 2 + HALF)
            position = first_position + (gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)) + HALF * ROWS) // GROUP
            mbarrier.wait(full.index(2 * STAGES + buffer), (blocks_done // 2) & 1)
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            score = hopper.warpgroup_mma(
                queries, k_smem.index(stage).permute((1, 0)), gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES),
                use_acc=False, is_async=True,
            )  # fmt: skip
            score = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(score,))
            mbarrier.arrive(empty.index(stage), count=1)
            score = _mask(score, position - (tiles - 1) * BLOCK_N, BLOCK_N, SCORES)
            peak = gl.maximum(gl.max(score, 1) * scale, -1e38)
            weight = gl.exp2(score * scale - peak[:, None])
            total = gl.sum(weight, 1)
            weights = gl.convert_layout(weight.to(k_smem.dtype), gl.DotOperandLayout(0, SUMS, 2))
            acc = gl.full([ROWS, D], 0.0, gl.float32, SUMS)
            if context < tiles * BLOCK_N:
                mbarrier.wait(full.index(STAGES + stage), (done // STAGES) & 1)
                clear_rows(v_smem.index(stage), context - (tiles - 1) * BLOCK_N, BLOCK_N)
            seen_by_all = gl.minimum((first_position + HALF * (ROWS // GROUP) + 1) // BLOCK_N, tiles - 1)
            for back in range(tiles - 1 - seen_by_all):
                done += 1
                weights, acc, peak, total = _step(
                    True, tiles - 2 - back, done, queries, k_smem, v_smem, full, empty, weights, acc, peak, total,
                    position, scale, ROWS, D, BLOCK_N, STAGES,
                )  # fmt: skip
            for back in range(seen_by_all):
                done += 1
                weights, acc, peak, total = _step(
                    False, seen_by_all - 1 - back, done, queries, k_smem, v_smem, full, empty, weights, acc, peak,
                    total, position, scale, ROWS, D, BLOCK_N, STAGES,
                )  # fmt: skip
            mbarrier.arrive(empty.index(2 * STAGES + buffer), count=1)
            blocks_done += 1
            stage = done % STAGES
            mbarrier.wait(full.index(STAGES + stage), (done // STAGES) & 1)
            acc = hopper.warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index(STAGES + stage), count=1)
            done += 1
            if SINKS:
                member = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)) % GROUP
                # Where a sink is so much larger that this is infinite, the result is 0.
                total += gl.exp2(gl.load(sinks + head * GROUP + member) * _LOG2_E - peak)
            pair = gl.arange(0, ROWS, layout=SUM_ROW) + HALF * ROWS
            query = first + pair // GROUP
            at = ((begin + query).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + pair % GROUP) * D
            dim = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
            result = acc / gl.convert_layout(total, SUM_ROW)[:, None]
            gl.store(out + at[:, None] + dim[None, :], result.to(k_smem.dtype), mask=(query < count)[:, None])


@gluon.jit
def _step(
    MASKED: gl.constexpr, tile, done, queries, k_smem, v_smem, full, empty, weights, acc, peak, total, position, scale,
    ROWS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the previous tile by its weights, and compute the weights of this one, the `done`-th."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    stage = done % STAGES
    before = (done - 1) % STAGES
    mbarrier.wait(full.index(stage), (done // STAGES) & 1)
    scoring = hopper.warpgroup_mma(
        queries, k_smem.index(stage).permute((1, 0)), gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES),
        use_acc=False, is_async=True,
    )  # fmt: skip
    mbarrier.wait(full.index(STAGES + before), ((done - 1) // STAGES) & 1)
    adding = hopper.warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
    score = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(scoring,))
    mbarrier.arrive(empty.index(stage), count=1)
    if MASKED:
        score = _mask(score, position - tile * BLOCK_N, BLOCK_N, SCORES)
    higher = gl.maximum(peak, gl.max(score, 1) * scale)
    weight = gl.exp2(score * scale - higher[:, None])
    fade = gl.exp2(peak - higher)
    total = total * fade + gl.sum(weight, 1)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(adding,))
    mbarrier.arrive(empty.index(STAGES + before), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
    weights = gl.convert_layout(weight.to(k_smem.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return weights, acc, higher, total


@gluon.jit
def _mask(score, last_seen, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    place = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    return gl.where(place[None, :] <= last_seen[:, None], score, float("-inf"))


@gluon.jit
def _bulk_kernel(
    queries, k_pages, v_pages, tables, table_rows, query_start, context_len, out, block_map, sinks, items, scale,
    table_stride, block_rows, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IN_ORDER: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Attend in bulk. Barriers `full` and `empty`: for STAGES tiles of K, as many of V, and two blocks' queries."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(k_pages.dtype, [4, BLOCK_M // 2, D], TILE)
    k_smem = gl.allocate_shared_memory(k_pages.dtype, [STAGES, BLOCK_N, D], TILE)
    v_smem = gl.allocate_shared_memory(k_pages.dtype, [STAGES, BLOCK_N, D], TILE)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES + 2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), out, query_start, context_len, block_map, sinks, items, scale, q_smem, k_smem, v_smem,
                full, empty, KV_HEADS, GROUP, D, BLOCK_M, BLOCK_N, STAGES, SINKS,
            )),
            (_attend, (
                gl.constexpr(1), out, query_start, context_len, block_map, sinks, items, scale, q_smem, k_smem, v_smem,
                full, empty, KV_HEADS, GROUP, D, BLOCK_M, BLOCK_N, STAGES, SINKS,
            )),
            (_copy, (
                gl.constexpr(0), queries, k_pages, tables, table_rows, query_start, context_len, block_map, items,
                table_stride, block_rows, q_smem, k_smem, full, empty, KV_HEADS, GROUP, D, BLOCK_SIZE, BLOCK_M, BLOCK_N,
                STAGES, IN_ORDER,
            )),
            (_copy, (
                gl.constexpr(1), queries, v_pages, tables, table_rows, query_start, context_len, block_map, items,
                table_stride, block_rows, q_smem, v_smem, full, empty, KV_HEADS, GROUP, D, BLOCK_SIZE, BLOCK_M, BLOCK_N,
                STAGES, IN_ORDER,
            )),
        ],
        [4, 1, 1],  # warps, and registers per thread, of all groups but the first
        [240, 40, 40],
    )  # fmt: skip
