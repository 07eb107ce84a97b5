"""Reading of a step's rows and their pieces (see `StateTables`) within kernels."""

from roseinfer.kernels.common.triton_support import tl, triton

# Arguments whose alignment and value differ from step to step. Compiling for each would stall requests.
PER_STEP = ("rows_ptr", "pieces_ptr", "num_rows")
# What tokens have for each head in `decays` [T, HV, GATES]: G, the sum of g within the piece; beta; and the decays e^G
# since the piece's beginning and until its end. The copy engine takes four numbers at least.
GATES = tl.constexpr(4)
TOTAL, BETA, SINCE, UNTIL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_row(rows_ptr, row, num_rows):
    """Return a row's slot, position of its first token, packed index of that token, and tokens."""
    at = rows_ptr + row
    slot = tl.load(at).to(tl.int64)
    return slot, tl.load(at + num_rows), tl.load(at + 2 * num_rows), tl.load(at + 3 * num_rows)


@triton.jit
def load_drafts(rows_ptr, row, num_rows):
    """Return a row's replayed tokens and drafts."""
    at = rows_ptr + row
    return tl.load(at + 7 * num_rows), tl.load(at + 8 * num_rows)


@triton.jit
def load_snapshot(rows_ptr, row, num_rows):
    """Return the slot of the snapshot of a row without pieces or -1, and the row's tokens before it."""
    at = rows_ptr + row
    return tl.load(at + 4 * num_rows).to(tl.int64), tl.load(at + 9 * num_rows)


@triton.jit
def load_pieces(rows_ptr, row, num_rows):
    """Return the range of a row's pieces."""
    at = rows_ptr + row
    return tl.load(at + 5 * num_rows), tl.load(at + 6 * num_rows)


@triton.jit
def load_pieced(rows_ptr, num_rows):
    """Return how many rows have pieces."""
    return tl.load(rows_ptr + 11 * num_rows)


@triton.jit
def load_pieced_row(rows_ptr, n, num_rows):
    """Return the n-th of the rows that have pieces."""
    return tl.load(rows_ptr + 10 * num_rows + n)


@triton.jit
def load_piece(pieces_ptr, piece):
    """Return a piece's row, packed index of its first token, tokens, and slot of the snapshot after it or -1."""
    at = pieces_ptr + piece * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3).to(tl.int64)
