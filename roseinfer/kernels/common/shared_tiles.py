"""Tiles in shared memory that the copy engine has brought."""

from roseinfer.kernels.common.gluon_support import gl, gluon, hopper, thread_barrier


@gluon.jit
def clear_rows(tile, count, ROWS: gl.constexpr):
    """Zero the rows of a tile after the first `count`, by four warps: they are arbitrary, and may be NaN."""
    QUARTER: gl.constexpr = ROWS // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, QUARTER, layout=gl.SliceLayout(1, LAYOUT))
    for part in gl.static_range(4):
        some = tile.slice(part * QUARTER, QUARTER, dim=0)
        some.store(gl.where((part * QUARTER + row < count)[:, None], some.load(LAYOUT), 0.0))
    hopper.fence_async_shared()
    thread_barrier()
