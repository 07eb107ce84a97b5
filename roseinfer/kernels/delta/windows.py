"""Windows of gated DeltaNet's convolution after rows of several tokens: the inputs that the next tokens read."""

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.kernels.delta.tables import PER_STEP, load_piece, load_pieced, load_pieced_row, load_pieces, load_row

WINDOW_BLOCK_ELEMENTS = 256
# Programs that share the rows of these channels. A captured step has room for many more rows than it mostly has.
MAX_WINDOW_PROGRAMS = 16


@triton.jit
def _store_window(
    mixed_ptr,
    window_ptr,
    source,
    target,
    row_first,
    end,
    position,
    channel,
    inside,
    mixed_stride,
    C,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """Write to `target` the inputs before packed index `end`, at `position`. Those before the row are in `source`."""
    for back in tl.static_range(1, TAPS):
        token = (end - back).to(tl.int64)
        entry = (tl.maximum(position - back, 0) % RING) * C + channel
        mask = inside & (position >= back)
        here = token >= row_first
        x = tl.load(mixed_ptr + token * mixed_stride + channel, mask=mask & here, other=0.0)
        x += tl.load(window_ptr + source + entry, mask=mask & (token < row_first), other=0.0)
        tl.store(window_ptr + target + entry, x, mask=mask)


@triton.jit(do_not_specialize=PER_STEP)
def window_kernel(
    mixed_ptr,
    window_ptr,
    rows_ptr,
    pieces_ptr,
    mixed_stride,
    window_stride,
    num_rows,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the windows of some channels of some rows. Snapshots read a row's old window, which is overwritten last."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    for n in range(tl.program_id(0), load_pieced(rows_ptr, num_rows), tl.num_programs(0)):
        row = load_pieced_row(rows_ptr, n, num_rows)
        begin, end = load_pieces(rows_ptr, row, num_rows)
        slot, start, row_first, row_count = load_row(rows_ptr, row, num_rows)
        ring = slot * window_stride
        for piece in range(begin, end):
            _row, first, count, snapshot = load_piece(pieces_ptr, piece)
            if snapshot >= 0:
                after = first + count
                position = start + after - row_first
                target = snapshot * window_stride
                _store_window(
                    mixed_ptr,
                    window_ptr,
                    ring,
                    target,
                    row_first,
                    after,
                    position,
                    channel,
                    inside,
                    mixed_stride,
                    C,
                    TAPS,
                    RING,
                )
        after = row_first + row_count
        position = start + row_count
        _store_window(
            mixed_ptr, window_ptr, ring, ring, row_first, after, position, channel, inside, mixed_stride, C, TAPS, RING
        )


def store_windows(inputs: DeltaInputs) -> None:
    """Write the windows of the slots of all rows that have pieces, and of their snapshots."""
    mixed, window, rows, pieces = inputs.mixed, inputs.window, inputs.rows, inputs.pieces
    (taps, channels), num_rows = inputs.conv.shape, rows.shape[1]
    window_kernel[(min(num_rows, MAX_WINDOW_PROGRAMS), cdiv(channels, WINDOW_BLOCK_ELEMENTS))](
        mixed,
        window,
        rows,
        pieces,
        mixed.stride(0),
        window.stride(0),
        num_rows,
        C=channels,
        TAPS=taps,
        RING=window.shape[1],
        BLOCK=WINDOW_BLOCK_ELEMENTS,
        **early_start.options(mixed.device),
    )
