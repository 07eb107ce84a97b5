"""Products by weights in four bits in pairs of float16, for kernels of few rows (compare `fp8_pairs`).

The bits of a code, and zeros before them, are a float16: a subnormal number, code * 2^-24, or 16 times as much a few
bits higher. So a code takes half an instruction to widen and another half to multiply and add. To make float16 hold x
as well, and products be normal numbers, each unit of 32 columns of x is multiplied by 2^15 / its largest.

The last dimension of tensors is a word's place in a unit, a load of 16 bytes. See `int4_codes` for its columns.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.linear.fp8_pairs import add_pairs, pack, sum_of_pair


@triton.jit
def dot_of_eight(w, x0, x1, x2, x3):
    """Multiply a word's eight codes by four pairs: return the sums of its even and of its odd columns, as a pair."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high, codes, sum;
        and.b32 codes, $1, 0x000f000f;
        mul.rn.f16x2 sum, codes, $2;
        and.b32 codes, $1, 0x00f000f0;
        fma.rn.f16x2 sum, codes, $3, sum;
        shr.u32 high, $1, 8;
        and.b32 codes, high, 0x000f000f;
        fma.rn.f16x2 sum, codes, $4, sum;
        and.b32 codes, high, 0x00f000f0;
        fma.rn.f16x2 $0, codes, $5, sum;
        }""",
        "=r,r,r,r,r,r",
        [w, x0, x1, x2, x3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def read_unit(pointers, chunk: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the eight columns of each word of units, four times [BLOCK_K / 32, R, 1, 8] float32; zero past column K.

    pointers: [1, R, 1, 1], of rows.
    """
    unit = tl.arange(0, BLOCK_K // 32)
    first = chunk * BLOCK_K + unit // 4 * 128 + unit % 4 * 8
    column = first[:, None, None, None] + tl.arange(0, 8)[None, None, None, :]
    parts = ()
    for j in tl.static_range(4):
        if chunk * BLOCK_K + BLOCK_K > K:
            at = column + 32 * j
            parts += (tl.load(pointers + at, mask=at < K, other=0.0).to(tl.float32),)
        else:
            parts += (tl.load(pointers + column + 32 * j).to(tl.float32),)
    return parts


@triton.jit
def _joined(a, b, c, d):
    """Stack four tensors [A, B, C] in a last dimension."""
    pairs = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(pairs, (0, 1, 2, 4, 3)), [a.shape[0], a.shape[1], a.shape[2], 4])


@triton.jit
def _pairs_of(eight, COMPILED: tl.constexpr):
    """Return the pairs 0 to 3 of eight columns [A, B, C, 8] float32: [A, B, C] int32 each.

    Not COMPILED: [A, B, 2 * C], the even columns and then the odd ones.
    """
    A: tl.constexpr = eight.shape[0]
    B: tl.constexpr = eight.shape[1]
    even, odd = tl.split(tl.reshape(eight, [A, B, eight.shape[2], 2, 2, 2]))
    if COMPILED:
        both = pack(even, odd)
    else:
        both = tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 5, 2, 3, 4)), [A, B, 2 * eight.shape[2], 2, 2])
    p02, p13 = tl.split(both)
    p0, p2 = tl.split(p02)
    p1, p3 = tl.split(p13)
    return p0, p1, p2, p3


@triton.jit
def narrow(parts, SPLIT: tl.constexpr, E2M1: tl.constexpr, COMPILED: tl.constexpr):
    """Prepare units of x, from `read_unit`, for `multiply`, or for `multiply_e2m1`."""
    a, b, c, d = parts
    largest = tl.maximum(tl.max(tl.abs(a), 3), tl.max(tl.abs(b), 3))
    largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(c), 3), tl.max(tl.abs(d), 3)))
    largest = tl.maximum(largest, 1e-30)
    sums = _joined(tl.sum(a, 3), tl.sum(b, 3), tl.sum(c, 3), tl.sum(d, 3))
    if not SPLIT:
        sums = tl.sum(sums, 3)
    if E2M1:
        factor = 16384.0 / largest[:, :, :, None]
        sixteenth = factor
        largest *= 0.00006103515625  # 2^-14
    else:
        factor = 32768.0 / largest[:, :, :, None]
        # The second and the fourth pair meet codes that are 16 times as large.
        sixteenth = tl.where(tl.arange(0, 8) // 2 % 2 == 0, 1.0, 0.0625)[None, None, None, :] * factor
        largest *= 512.0  # 2^24 / 2^15
    a0, a1, a2, a3 = _pairs_of(a * sixteenth, COMPILED)
    b0, b1, b2, b3 = _pairs_of(b * sixteenth, COMPILED)
    c0, c1, c2, c3 = _pairs_of(c * sixteenth, COMPILED)
    d0, d1, d2, d3 = _pairs_of(d * sixteenth, COMPILED)
    x0, x1 = _joined(a0, b0, c0, d0), _joined(a1, b1, c1, d1)
    x2, x3 = _joined(a2, b2, c2, d2), _joined(a3, b3, c3, d3)
    if SPLIT:
        largest = largest[:, :, :, None]
    return x0, x1, x2, x3, largest, sums


@triton.jit
def _interpreted_dot(w, x0, x1, x2, x3):
    """Return the sums of words' products, in units of 2^-24."""
    result = tl.zeros([w.shape[0], x0.shape[1], w.shape[2], 4], tl.float32)
    for i in tl.static_range(4):
        x = (x0, x1, x2, x3)[i]
        even, odd = tl.split(tl.permute(tl.reshape(x, [x.shape[0], x.shape[1], 1, 2, 4]), (0, 1, 2, 4, 3)))
        codes = (w >> (4 * i)) & 0x000F000F
        scale = 16.0 if i % 2 == 1 else 1.0
        result += ((codes & 15).to(tl.float32) * even + (codes >> 16).to(tl.float32) * odd) * scale
    return result * 5.9604644775390625e-8


@triton.jit
def multiply(w, scales, shifts, x, SPLIT: tl.constexpr, COMPILED: tl.constexpr):
    """Return the sums over each unit of (scales * (codes - 8) + shifts) * x, float32.

    w: words [A, 1, N, 4]. x: of `narrow`. scales, shifts: [A, 1, N], or with SPLIT of each word.
    """
    x0, x1, x2, x3, largest, sums = x
    if COMPILED:
        dots = dot_of_eight(w, x0, x1, x2, x3)
        if not SPLIT:
            dots = tl.reduce(dots, -1, add_pairs)
        dots = sum_of_pair(dots)
    else:
        dots = _interpreted_dot(w, x0, x1, x2, x3)
        if not SPLIT:
            dots = tl.sum(dots, -1)
    result = (dots * largest - 8.0 * sums) * scales + shifts * sums
    if SPLIT:
        result = tl.sum(result, 3)
    return result
