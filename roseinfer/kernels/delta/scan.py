"""The scan of gated DeltaNet, which passes the state from piece to piece of a row."""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.delta.scan_bulk import scan_bulk, scan_in_bulk
from roseinfer.kernels.delta.solve import tf32
from roseinfer.kernels.delta.tables import (
    DECAY_FIELD_COUNT,
    PER_STEP,
    PIECE_TOKENS,
    SINCE,
    UNTIL,
    load_piece,
    load_pieces,
    load_row,
)

# Values of a head that one program computes: few, if all programs of a row then run at the same time. With 32 heads
# they are 128, and an H200 has 132 multiprocessors.
MAX_VALUES, MAX_VALUES_OF_MANY_HEADS, MAX_FEW_HEADS = 32, 64, 32


@triton.jit(do_not_specialize=PER_STEP)
def scan_kernel(
    heads_ptr,
    decays_ptr,
    own_ptr,
    read_ptr,
    within_ptr,
    memory_ptr,
    rows_ptr,
    pieces_ptr,
    out_ptr,
    memory_stride,
    num_rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the outputs o [T, HV * D] of some values of one head of one row, and its states: at snapshots and last."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = load_pieces(rows_ptr, row, num_rows)
    if begin < end:
        key_head = head // (HV // HK)
        C: tl.constexpr = (2 * HK + HV) * D
        slot, start, _first, _count = load_row(rows_ptr, row, num_rows)
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        value = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        part = head * D * D + d[:, None] * D + value[None, :]
        state = tl.load(memory_ptr + slot * memory_stride + part, mask=(start > 0) & (part >= 0), other=0.0)
        for piece in range(begin, end):
            _row, first, count, snapshot = load_piece(pieces_ptr, piece)
            inside = (i < count)[:, None]
            token = (first + i).to(tl.int64)
            decays = decays_ptr + (token * HV + head) * DECAY_FIELD_COUNT
            since = tl.load(decays + SINCE, mask=i < count, other=1.0)
            until = tl.load(decays + UNTIL, mask=i < count, other=0.0)
            whole = tl.min(since, 0)  # of the piece: nothing grows
            by_head = (token * HV + head)[:, None]
            read = tl.load(read_ptr + by_head * D + d, mask=inside, other=0.0).to(tl.float32)
            own = tl.load(own_ptr + by_head * D + value, mask=inside, other=0.0).to(tl.float32)
            new = own - tl.dot(read, state, input_precision=PRECISION)
            q = tl.load(heads_ptr + token[:, None] * C + key_head * D + d, mask=inside, other=0.0).to(tl.float32)
            output = tl.dot(q * since[:, None], state, input_precision=PRECISION)
            within = tl.load(within_ptr + by_head * SIZE + i, mask=inside, other=0.0).to(tl.float32)
            output += tl.dot(within, new, input_precision=PRECISION)
            to = out_ptr + by_head * D + value
            tl.store(to, output.to(out_ptr.dtype.element_ty), mask=inside)
            k = tl.load(heads_ptr + token[:, None] * C + (HK + key_head) * D + d, mask=inside, other=0.0).to(tl.float32)
            k *= until[:, None]
            state = state * whole + tl.dot(tl.trans(k), new, input_precision=PRECISION)
            if snapshot >= 0:
                tl.store(memory_ptr + snapshot * memory_stride + part, state)
        tl.store(memory_ptr + slot * memory_stride + part, state)


def scan(
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
    """Write the outputs of all pieces, before their norm, to `out` [T, HV * D], and the states of rows and snapshots.

    own, read, within: as `solve` returns them for `heads` and `decays`. memory, rows, pieces: as in `DeltaInputs`.
    """
    value_heads, width = memory.shape[1], memory.shape[2]
    if scan_in_bulk(width, heads.dtype, heads.device):
        scan_bulk(heads, decays, own, read, within, memory, rows, pieces, out)
        return
    num_rows = rows.shape[1]
    values = min(width, MAX_VALUES if value_heads <= MAX_FEW_HEADS else MAX_VALUES_OF_MANY_HEADS)
    scan_kernel[(num_rows, value_heads, width // values)](
        heads,
        decays,
        own,
        read,
        within,
        memory,
        rows,
        pieces,
        out,
        memory.stride(0),
        num_rows,
        HK=(heads.shape[1] // width - value_heads) // 2,
        HV=value_heads,
        D=width,
        WIDTH=values,
        SIZE=PIECE_TOKENS,
        PRECISION=tf32(heads.dtype),
        **early_start.options(heads.device),
    )
