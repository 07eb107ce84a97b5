"""Products by FP8 (e4m3) in pairs of float16, for kernels of few rows.

Instructions, not memory, limit the speed of one row: widening a code to float32 and multiplying it takes three. The GPU
widens two codes to float16 at once, and multiplies and adds such pairs, in one and a half per code. Float16 holds every
code. To make it hold x as well, each 16 columns of x are divided by the largest of them. Their products, at most 448
each, are summed in float16, eight of them in one half of a pair, and everything else in float32. Sums of 11 bits lose
no more precision than an x of 8 bits has lost.

The last dimension of tensors is the place in a group of 16 columns: a thread holds all places of a group, which are one
load of 16 bytes. `narrow` takes four dimensions, `multiply` any number.
"""

from roseinfer.kernels.common.triton_support import tl, triton


@triton.jit
def pack(low, high):
    """Return two float32 as a pair of float16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _dot_of_four(w, x01, x23):
    """Multiply four codes by two pairs: return the sums of columns 0 and 2, and of 1 and 3, as a pair."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 w01, w23;
        mov.b32 {low, high}, $1;
        cvt.rn.f16x2.e4m3x2 w01, low;
        cvt.rn.f16x2.e4m3x2 w23, high;
        mul.rn.f16x2 w01, w01, $2;
        fma.rn.f16x2 $0, w23, $3, w01;
        }""",
        "=r,r,r,r",
        [w, x01, x23],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def add_pairs(a, b):
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def sum_of_pair(pair):
    """Return the sum of a pair in float32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .f32 a, b;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 a, low;
        cvt.f32.f16 b, high;
        add.f32 $0, a, b;
        }""",
        "=f,r",
        [pair],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def read_halves(pointers, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Return columns 0 to 7 of each 16, and 8 to 15: [BLOCK_K / 16, R, 1, 8] float32 each; zeros from COLUMNS on.

    pointers: [1, R, 1, 1], of rows.
    """
    first = (tl.arange(0, BLOCK_K // 16) * 16)[:, None, None, None]
    at = pointers + first + tl.arange(0, 8)[None, None, None, :]
    if COLUMNS < BLOCK_K:
        low = tl.load(at, mask=first < COLUMNS, other=0.0)
        high = tl.load(at + 8, mask=first < COLUMNS, other=0.0)
    else:
        low, high = tl.load(at), tl.load(at + 8)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pairs_of(half):
    """Return [A, B, C, 8] float32 as pairs [A, B, C, 2] int32: columns 0 and 1 of each four, and columns 2 and 3."""
    even, odd = tl.split(tl.reshape(half, [half.shape[0], half.shape[1], half.shape[2], 2, 2, 2]))
    return tl.split(pack(even, odd))


@triton.jit
def _concatenated(low, high):
    """Concatenate the halves of groups, [A, B, C, n] each: [A, B, C, 2 * n]."""
    both = tl.permute(tl.join(low, high), (0, 1, 2, 4, 3))
    return tl.reshape(both, [low.shape[0], low.shape[1], low.shape[2], 2 * low.shape[3]])


@triton.jit
def narrow(low, high, COMPILED: tl.constexpr):
    """Return x / largest in two tensors of pairs for `_dot_of_four`, and `largest`, for each group.

    low, high: the halves of groups, [A, B, C, 8] float32. Without COMPILED, for the interpreter, which has no such
    pairs: x / largest [A, B, C, 16] float16, twice.
    """
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(low), 3), tl.max(tl.abs(high), 3)), 1e-30)
    inverse = (1.0 / largest)[:, :, :, None]
    low, high = low * inverse, high * inverse
    if COMPILED:
        low01, low23 = _pairs_of(low)
        high01, high23 = _pairs_of(high)
        x01, x23 = _concatenated(low01, high01), _concatenated(low23, high23)
    else:
        x01 = _concatenated(low, high).to(tl.float16)
        x23 = x01
    return x01, x23, largest


@triton.jit
def neighbours(half):
    """Return the even and the odd columns of [A, B, C, 8]: [A, B, C, 4] each."""
    return tl.split(tl.reshape(half, [half.shape[0], half.shape[1], half.shape[2], 4, 2]))


@triton.jit
def multiply(w, x01, x23, COMPILED: tl.constexpr):
    """Return the sums over each group of codes (four in an int32 if COMPILED) times x, float32."""
    if COMPILED:
        return sum_of_pair(tl.reduce(_dot_of_four(w, x01, x23), -1, add_pairs))
    else:
        return tl.sum(w.to(tl.float32) * x01.to(tl.float32), -1)
