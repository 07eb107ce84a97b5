"""The scan of gated DeltaNet's pieces on a Hopper GPU (`scan_bulk`): what `scan_kernel` computes, for bfloat16.

Four warps keep the state of 64 values of a head, transposed, in their registers and multiply it from there. The other
factors are read from shared memory as the kernels before have written them; a fifth warp has the copy engine bring
those of the next piece meanwhile. A float32 factor is two of bfloat16, as in `solve`.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.availability import has_large_steps, multiprocessors
from roseinfer.kernels.common.gluon_support import HAS_GLUON, BulkDescriptor, gl, gluon, hopper
from roseinfer.kernels.common.shared_tiles import clear_rows
from roseinfer.kernels.common.triton_support import tl
from roseinfer.kernels.delta.solve import HIGH_BITS
from roseinfer.kernels.delta.tables import (
    DECAY_FIELD_COUNT,
    NUM_PIECED,
    PER_STEP,
    PIECE_FIELD_COUNT,
    PIECE_TOKENS,
    PIECED,
    PIECES_FROM,
    PIECES_TO,
    SINCE,
    SLOT,
    START,
    UNTIL,
)

mbarrier, tma = hopper.mbarrier, hopper.tma

# Pieces in shared memory: a third makes no difference.
STAGE_COUNT = 2
WIDTHS = (64, 128)
# Tokens of a piece, values of a head that one program computes, columns that the copy engine takes at a time.
_SIZE: gl.constexpr = gl.constexpr(PIECE_TOKENS)
_VALUES: gl.constexpr = gl.constexpr(64)
_COLUMNS: gl.constexpr = gl.constexpr(64)
_TILE, _DECAY_TILE = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 2)


def scan_in_bulk(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel supports heads of so many numbers on this device."""
    return HAS_GLUON and width in WIDTHS and dtype is torch.bfloat16 and has_large_steps(device)


@gluon.jit
def _copy(
    heads, reads, owns, withins, decays, rows_ptr, pieces_ptr, num_rows, wide, square, narrow, full, empty,
    HK: gl.constexpr, HV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Run the warp that copies piece after piece."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: gl.constexpr = D // _COLUMNS
    PIECE_BYTES: gl.constexpr = (3 * PARTS + 2) * _SIZE * _COLUMNS * 2 + _SIZE * DECAY_FIELD_COUNT * 4
    done = 0
    for item in range(gl.program_id(0), _items(rows_ptr, num_rows, HV, D), gl.num_programs(0)):
        _row, head, first_value, begin, end = _item(rows_ptr, num_rows, item, HV, D)
        key = head // (HV // HK) * D
        for piece in range(begin, end):
            first, _count, _snapshot = _piece(pieces_ptr, piece)
            stage = done % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(ready, PIECE_BYTES)
            # In the order in which they are read. A tile has its first columns of all tokens, then the others.
            tile = 3 * PARTS * stage
            for part in gl.static_range(PARTS):
                column = head * D + part * _COLUMNS
                tma.async_copy_global_to_shared(reads, [first, column], ready, wide.index(tile + part))
            tma.async_copy_global_to_shared(owns, [first, head * D + first_value], ready, square.index(2 * stage))
            tma.async_copy_global_to_shared(decays, [first, head * DECAY_FIELD_COUNT], ready, narrow.index(stage))
            for part in gl.static_range(2 * PARTS):
                column = part // PARTS * HK * D + key + part % PARTS * _COLUMNS  # of queries, then of keys
                tma.async_copy_global_to_shared(heads, [first, column], ready, wide.index(tile + PARTS + part))
            tma.async_copy_global_to_shared(withins, [first, head * _SIZE], ready, square.index(2 * stage + 1))
            done += 1


@gluon.jit
def _items(rows_ptr, num_rows, HV: gl.constexpr, D: gl.constexpr):
    """Return the number of items of work: 64 values of a head of a row that has pieces."""
    return gl.load(rows_ptr + NUM_PIECED * num_rows) * (HV * D // _VALUES)


@gluon.jit
def _item(rows_ptr, num_rows, item, HV: gl.constexpr, D: gl.constexpr):
    """Return an item's row, head and first value, and the range of the row's pieces."""
    row = gl.load(rows_ptr + PIECED * num_rows + item // (HV * D // _VALUES))
    part = item % (HV * D // _VALUES)
    at = rows_ptr + row
    head, first_value = part // (D // _VALUES), part % (D // _VALUES) * _VALUES
    return row, head, first_value, gl.load(at + PIECES_FROM * num_rows), gl.load(at + PIECES_TO * num_rows)


@gluon.jit
def _piece(pieces_ptr, piece):
    """Return a piece's first token, tokens, and slot of the snapshot after it or -1; see `load_piece`."""
    at = pieces_ptr + piece * PIECE_FIELD_COUNT
    return gl.load(at + 1), gl.load(at + 2), gl.load(at + 3).to(gl.int64)


@gluon.jit
def _parts(x, LAYOUT: gl.constexpr):
    """Return two bfloat16 whose sum is x, but for its last 8 bits, as left sides of products."""
    high = (x.to(gl.int32, bitcast=True) & HIGH_BITS).to(gl.float32, bitcast=True)
    low = (x - high).to(gl.bfloat16)
    return gl.convert_layout(high.to(gl.bfloat16), LAYOUT), gl.convert_layout(low, LAYOUT)


@gluon.jit
def _scan(
    memory_ptr, rows_ptr, pieces_ptr, out_ptr, memory_stride, num_rows, wide, square, narrow, full, empty,
    HV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Run the four warps that hold the state [values, D]. Results of tokens are [values, tokens], too."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SIZE, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    wide = wide._reinterpret(gl.bfloat16, [3 * STAGES, _SIZE, D], gl.NVMMASharedLayout(128, 16, 2))
    narrow = narrow._reinterpret(
        gl.float32, [STAGES, _SIZE, DECAY_FIELD_COUNT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    i = gl.arange(0, _SIZE, layout=gl.SliceLayout(0, TOKENS))
    token = gl.arange(0, _SIZE, layout=gl.SliceLayout(0, LINES))
    value = gl.arange(0, _VALUES, layout=gl.SliceLayout(1, STORED))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, STORED))
    part = value[:, None] + d[None, :] * D
    done = 0
    for item in range(gl.program_id(0), _items(rows_ptr, num_rows, HV, D), gl.num_programs(0)):
        row, head, first_value, begin, end = _item(rows_ptr, num_rows, item, HV, D)
        slot = gl.load(rows_ptr + SLOT * num_rows + row).to(gl.int64)
        start = gl.load(rows_ptr + START * num_rows + row)
        memory = memory_ptr + (head * D * D + first_value)
        stored = gl.load(memory + slot * memory_stride + part, mask=(start > 0) & (part >= 0), other=0.0)
        state = gl.convert_layout(stored, STATE)
        out_value = head * D + first_value + gl.arange(0, _VALUES, layout=gl.SliceLayout(1, LINES))
        first, count, snapshot = _piece(pieces_ptr, begin)
        for piece in range(begin, end):
            # To load these later takes longer.
            next_first, next_count, next_snapshot = _piece(pieces_ptr, gl.minimum(piece + 1, end - 1))
            stage = done % STAGES
            high, low = _parts(-state, LEFT)
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            inside = (i < count)[None, :]
            decays = narrow.index(stage).permute((1, 0))
            since = gl.where(inside, decays.slice(SINCE, 1).load(TOKENS), 1.0)
            until = gl.where(inside, decays.slice(UNTIL, 1).load(TOKENS), 0.0)
            whole = gl.min(gl.min(since, 1), 0)  # of the piece: nothing grows
            own = square.index(2 * stage).permute((1, 0)).load(TOKENS).to(gl.float32)
            read = wide.index(3 * stage).permute((1, 0))
            new = hopper.warpgroup_mma(low, read, own, is_async=True)
            new = hopper.warpgroup_mma(high, read, new, is_async=True)
            query = wide.index(3 * stage + 1).permute((1, 0))
            nothing = gl.full([_VALUES, _SIZE], 0.0, gl.float32, TOKENS)
            output = hopper.warpgroup_mma(low, query, nothing, use_acc=False, is_async=True)
            output = hopper.warpgroup_mma(high, query, output, is_async=True)
            new = hopper.warpgroup_mma_wait(num_outstanding=2, deps=(new,))
            new = gl.where(inside, new, 0.0)
            keys = wide.index(3 * stage + 2)
            if count < _SIZE:
                clear_rows(keys, count, _SIZE)  # 0 times NaN is NaN
            faded_high, faded_low = _parts(new * until, LEFT_OF_STATE)
            state = hopper.warpgroup_mma(faded_low, keys, state * whole, is_async=True)
            state = hopper.warpgroup_mma(faded_high, keys, state, is_async=True)
            new_high, new_low = _parts(new, LEFT)
            output, _high, _low = hopper.warpgroup_mma_wait(num_outstanding=2, deps=(output, high, low))
            within = square.index(2 * stage + 1).permute((1, 0))
            output = hopper.warpgroup_mma(new_low, within, output * -since, is_async=True)
            output = hopper.warpgroup_mma(new_high, within, output, is_async=True)
            state, _high, _low = hopper.warpgroup_mma_wait(num_outstanding=2, deps=(state, faded_high, faded_low))
            output, _high, _low = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(output, new_high, new_low))
            mbarrier.arrive(empty.index(stage), count=1)
            to = out_ptr + ((first + token).to(gl.int64) * (HV * D))[None, :] + out_value[:, None]
            output = gl.convert_layout(output.to(gl.bfloat16), LINES)
            gl.store(to, output, mask=(token < count)[None, :] & (out_value >= 0)[:, None])
            if snapshot >= 0:
                gl.store(memory + snapshot * memory_stride + part, gl.convert_layout(state, STORED))
            first, count, snapshot = next_first, next_count, next_snapshot
            done += 1
        gl.store(memory + slot * memory_stride + part, gl.convert_layout(state, STORED))


@gluon.jit(do_not_specialize=list(PER_STEP))
def scan_bulk_kernel(
    heads,
    reads,
    owns,
    withins,
    decays,
    memory_ptr,
    rows_ptr,
    pieces_ptr,
    out_ptr,
    memory_stride,
    num_rows,
    HK: gl.constexpr,
    HV: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Compute 64 values of one head of one row, and then of another. A program has several of them, since it takes as
    long to start as some pieces.

    Each stage of shared memory has in `wide` the tiles [_SIZE, D] of `read`, queries and keys, in `square` those of
    `own` and `within` [_SIZE, 64], and in `narrow` the piece's part of `decays`.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    wide = gl.allocate_shared_memory(gl.bfloat16, [3 * (D // _COLUMNS) * STAGES, _SIZE, _COLUMNS], TILE)
    square = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, _SIZE, _COLUMNS], TILE)
    narrow = gl.allocate_shared_memory(gl.float32, [STAGES, _SIZE, DECAY_FIELD_COUNT], decays.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_scan, (
                memory_ptr, rows_ptr, pieces_ptr, out_ptr, memory_stride, num_rows, wide, square, narrow, full, empty,
                HV, D, STAGES, OVERLAP,
            )),
            (_copy, (
                heads, reads, owns, withins, decays, rows_ptr, pieces_ptr, num_rows, wide, square, narrow, full, empty,
                HK, HV, D, STAGES, OVERLAP,
            )),
        ],
        [1],  # warps, and registers per thread, of the second
        [40],
    )  # fmt: skip


def scan_bulk(
    heads: torch.Tensor,
    decays: torch.Tensor,
    own: torch.Tensor,
    read: torch.Tensor,
    within: torch.Tensor,
    memory: torch.Tensor,
    rows: torch.Tensor,
    pieces: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute like `scan_kernel`, with its arguments; `memory` [S, HV, D, D] is strided by slot."""
    value_heads, width = memory.shape[1], memory.shape[2]
    num_rows, tile = rows.shape[1], [PIECE_TOKENS, _COLUMNS.value]
    most = num_rows * value_heads * width // _VALUES.value
    scan_bulk_kernel[(min(most, multiprocessors(heads.device)),)](
        BulkDescriptor.from_tensor(heads, tile, _TILE),
        BulkDescriptor.from_tensor(read, tile, _TILE),
        BulkDescriptor.from_tensor(own, tile, _TILE),
        BulkDescriptor.from_tensor(within, tile, _TILE),
        # The copy engine wants columns that begin at a multiple of 16 bytes.
        BulkDescriptor.from_tensor(decays.flatten(1), [PIECE_TOKENS, DECAY_FIELD_COUNT.value], _DECAY_TILE),
        memory,
        rows,
        pieces,
        out,
        memory.stride(0),
        num_rows,
        HK=(heads.shape[1] // width - value_heads) // 2,
        HV=value_heads,
        D=width,
        STAGES=STAGE_COUNT,
        num_warps=4,
        **early_start.options(heads.device),
    )
