"""Reading of a step's rows and their pieces (see `StateTables`) within kernels, and what these leave for each other."""

from roseinfer.kernels.common.triton_support import tl, triton

# Arguments whose alignment and value differ from step to step. Compiling for each would stall requests.
PER_STEP = ("rows_ptr", "pieces_ptr", "num_rows")
PIECE_TOKENS = 64
# Lines of `StateTables.rows`, and columns of `StateTables.pieces`.
SLOT, START, FIRST, COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SNAPSHOT, PIECES_FROM, PIECES_TO = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
REPLAYED, DRAFTS, SNAPSHOT_AFTER = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)
PIECED, NUM_PIECED = tl.constexpr(10), tl.constexpr(11)
PIECE_FIELD_COUNT = tl.constexpr(4)
# What tokens have for each head in `decays` [T, HV, DECAY_FIELD_COUNT]: G, the sum of g within the piece; beta; and the
# decays e^G since the piece's beginning and until its end. The copy engine takes four numbers at least.
TOTAL, BETA, SINCE, UNTIL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DECAY_FIELD_COUNT = tl.constexpr(4)


@triton.jit
def load_row(rows_ptr, row, num_rows):
    """Return a row's slot, position of its first token, packed index of that token, and tokens."""
    at = rows_ptr + row
    slot = tl.load(at + SLOT * num_rows).to(tl.int64)
    return slot, tl.load(at + START * num_rows), tl.load(at + FIRST * num_rows), tl.load(at + COUNT * num_rows)


@triton.jit
def load_drafts(rows_ptr, row, num_rows):
    """Return a row's replayed tokens and drafts."""
    at = rows_ptr + row
    return tl.load(at + REPLAYED * num_rows), tl.load(at + DRAFTS * num_rows)


@triton.jit
def load_snapshot(rows_ptr, row, num_rows):
    """Return the slot of the snapshot of a row without pieces or -1, and the row's tokens before it."""
    at = rows_ptr + row
    return tl.load(at + SNAPSHOT * num_rows).to(tl.int64), tl.load(at + SNAPSHOT_AFTER * num_rows)


@triton.jit
def load_pieces(rows_ptr, row, num_rows):
    """Return the range of a row's pieces."""
    at = rows_ptr + row
    return tl.load(at + PIECES_FROM * num_rows), tl.load(at + PIECES_TO * num_rows)


@triton.jit
def load_pieced(rows_ptr, num_rows):
    """Return how many rows have pieces."""
    return tl.load(rows_ptr + NUM_PIECED * num_rows)


@triton.jit
def load_pieced_row(rows_ptr, n, num_rows):
    """Return the n-th of the rows that have pieces."""
    return tl.load(rows_ptr + PIECED * num_rows + n)


@triton.jit
def load_piece(pieces_ptr, piece):
    """Return a piece's row, packed index of its first token, tokens, and slot of the snapshot after it or -1."""
    at = pieces_ptr + piece * PIECE_FIELD_COUNT
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3).to(tl.int64)
