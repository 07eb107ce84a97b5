"""Products of some rows by a weight in four bits on a Hopper GPU (`int4_bulk_product`).

The copy engine brings codes, scales and inputs to shared memory, several blocks of columns ahead: the weight from the
start, inputs as soon as the kernel before has written them. Groups of four warps read codes, widen them in registers
and multiply from there. Of a product on these matrix units only the left side may be registers, so that is the weight.
A program takes all columns of its outputs, or a share of them, as in `fp8_tiles`; of those, groups of warps may take
blocks in turn, whose sums meet in shared memory.
"""

from collections.abc import Callable

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.gluon_support import HAS_GLUON, BulkDescriptor, gl, gluon, hopper, thread_barrier
from roseinfer.kernels.common.triton_support import cdiv, tl
from roseinfer.kernels.linear.fp8_tiles import Parts
from roseinfer.kernels.linear.int4_bulk_configs import COPYING_REGISTER_COUNT, WEIGHT_TILE_ROWS, BulkConfig
from roseinfer.kernels.linear.int4_codes import BLOCK_COLUMNS, PackedInt4
from roseinfer.kernels.linear.nvfp4_codes import NEGATIVE_ZERO, scale_pairs, widened_pair

mbarrier, tma = hopper.mbarrier, hopper.tma

BLOCK: gl.constexpr = gl.constexpr(BLOCK_COLUMNS)
OUTS: gl.constexpr = gl.constexpr(WEIGHT_TILE_ROWS)
_COPYING: gl.constexpr = gl.constexpr(COPYING_REGISTER_COUNT)
_X_LAYOUT, _W_LAYOUT = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(64, 8, 2)
_SCALES_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)
# Of codes [OUTS, t, j, byte].
_OF_BYTES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]], [], [WEIGHT_TILE_ROWS, 4, 4, 4],
    )
)  # fmt: skip
# The copy engine reads rows that begin at multiples of 16 bytes: so many scales with shifts.
_ALIGNED_ELEMENTS = 4


def _assembly(constants: list[str], widen: Callable[[int, int, int], list[str]]) -> str:
    """Return the widening of a thread's four words ($16 to $19) to 16 pairs of 16 bits.

    Of 32 columns, each of four threads has a word with eight. They exchange pairs of columns, so that thread t has
    columns 2 * t and 2 * t + 1 of each eight, as the matrix units want them. widen: returns the instructions that widen
    pair i of word j, to an output. constants: those before all others.
    """
    lines = [
        ".reg .b32 lane, turn, kept, bytes, other, word, pair, sign, one, zero;",
        ".reg .pred odd, upper;",
        "mov.u32 lane, %laneid;",
        "and.b32 other, lane, 1;",
        "setp.ne.u32 odd, other, 0;",
        "and.b32 other, lane, 2;",
        "setp.ne.u32 upper, other, 0;",
        "selp.b32 turn, 28, 4, odd;",
        "selp.b32 kept, 0xf0f0f0f0, 0x0f0f0f0f, odd;",
        "selp.b32 bytes, 0x3715, 0x6240, upper;",
        *constants,
    ]
    for j in range(4):
        lines += [
            f"shfl.sync.bfly.b32 other, ${16 + j}, 1, 31, 0xffffffff;",
            "shf.l.wrap.b32 other, other, other, turn;",
            f"lop3.b32 word, ${16 + j}, other, kept, 0xe4;",  # word & kept | other & ~kept
            "shfl.sync.bfly.b32 other, word, 2, 31, 0xffffffff;",
            "prmt.b32 word, word, other, bytes;",
        ]
        for i in range(4):
            lines += widen(i, j, 2 * j + i % 2 + 8 * (i // 2))
    return "{\n" + "\n".join(lines) + "\n}"


def _int4(kind: str, bits: int, one: int, zero: int) -> str:
    """Return the widening of int4, as in `int4_codes`: times scales ($20 ...) plus shifts ($28 ...)."""

    def widen(i: int, j: int, out: int) -> list[str]:
        return [
            *(["shr.u32 word, word, 4;"] if i else []),
            f"lop3.b32 pair, word, 0x000f000f, {bits:#010x}, 0xea;",  # word & mask | bits
            f"fma.rn.{kind}x2 pair, pair, one, zero;",
            f"fma.rn.{kind}x2 ${out}, pair, ${20 + 2 * j}, ${28 + 2 * j};",
        ]

    return _assembly([f"mov.b32 one, {one:#010x};", f"mov.b32 zero, {zero:#010x};"], widen)


def _e2m1(kind: str) -> str:
    """Return the widening of e2m1, as in `nvfp4_codes`: times pairs of scales of the first 16 columns of 32 ($20
    ...), or of the others ($36 ...). After the exchange these have pairs 0 and 1, and pairs 2 and 3.
    """

    def widen(i: int, j: int, out: int) -> list[str]:
        return [*widened_pair(i, kind), f"fma.rn.{kind}x2 ${out}, pair, ${20 + 16 * (i // 2) + 4 * j}, zero;"]

    return _assembly([NEGATIVE_ZERO], widen)


_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 20))
_BFLOAT16 = gl.constexpr(_int4("bf16", 0x43004300, 0x3F803F80, 0xC308C308))
_FLOAT16 = gl.constexpr(_int4("f16", 0x64006400, 0x3C003C00, 0xE408E408))
_E2M1_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 36))
_E2M1_BFLOAT16, _E2M1_FLOAT16 = gl.constexpr(_e2m1("bf16")), gl.constexpr(_e2m1("f16"))


@gluon.jit
def _read(w_ring, s_ring, full, place, stage, phase, E2M1: gl.constexpr):
    """Return a block's codes [OUTS, 4, 4, 4] uint8, and the words of their scales: [OUTS, 1 or 4], or two [OUTS]."""
    flat: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 64],
    )  # fmt: skip
    mbarrier.wait(full.index(stage), phase)
    codes = w_ring.index(place).load(flat)
    codes = gl.convert_layout(gl.reshape(codes, [OUTS, 4, 4, 4]), _OF_BYTES, assert_trivial=True)
    if E2M1:
        flat_words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        rows = s_ring._reinterpret(s_ring.dtype, [2 * s_ring.shape[0], OUTS], flat_words)
        of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _OF_BYTES)))
        return codes, (rows.index(2 * place).load(of_rows), rows.index(2 * place + 1).load(of_rows))
    else:
        words = s_ring._reinterpret(s_ring.dtype, s_ring.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(place)
        return codes, words.permute((1, 0)).load(gl.SliceLayout(1, gl.SliceLayout(3, _OF_BYTES)))


@gluon.jit
def _widen(codes, words, DTYPE: gl.constexpr, LEFT: gl.constexpr, E2M1: gl.constexpr):
    """Return codes, with words of scales, as the left side of a product [OUTS, BLOCK]."""
    low, high = _e2m1_halves(codes, words, DTYPE) if E2M1 else _int4_halves(codes, words, DTYPE)
    w = gl.reshape(gl.join(low, high), [OUTS, 4, 4, 2, 2, 2])  # t, j, eight of the half, column, half
    w = gl.permute(w, (0, 2, 5, 3, 1, 4))
    return gl.convert_layout(gl.reshape(w, [OUTS, BLOCK]), LEFT, assert_trivial=True)


@gluon.jit
def _e2m1_halves(codes, words, DTYPE: gl.constexpr):
    first, second = _scales_of(words[0], DTYPE), _scales_of(words[1], DTYPE)
    ASSEMBLY: gl.constexpr = _E2M1_BFLOAT16 if gl.bfloat16 == DTYPE else _E2M1_FLOAT16
    KIND: gl.constexpr = gl.bfloat16 if gl.bfloat16 == DTYPE else gl.float16
    return gl.inline_asm_elementwise(
        ASSEMBLY, _E2M1_OPERANDS, [codes, first, second], dtype=(KIND.value, KIND.value), is_pure=True, pack=16
    )


@gluon.jit
def _scales_of(words, DTYPE: gl.constexpr):
    """Return pairs of the scales [OUTS, 1, j, 1] in words [OUTS]."""
    j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, _OF_BYTES))))
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 1), 3)
    words = gl.expand_dims(gl.expand_dims(gl.expand_dims(words, 1), 2), 3)
    return scale_pairs(words, j, DTYPE)


@gluon.jit
def _int4_halves(codes, words, DTYPE: gl.constexpr):
    bits = gl.expand_dims(gl.expand_dims(words, 1), 3)
    scales = bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(DTYPE)
    shifts = (bits >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(DTYPE)
    ASSEMBLY: gl.constexpr = _BFLOAT16 if gl.bfloat16 == DTYPE else _FLOAT16
    return gl.inline_asm_elementwise(
        ASSEMBLY, _OPERANDS, [codes, scales, shifts], dtype=(scales.dtype, scales.dtype), is_pure=True, pack=16
    )


@gluon.jit
def _copy_inputs(inputs, STEPS: gl.constexpr, OVERLAP: gl.constexpr):
    """Run a warp that copies blocks of inputs."""
    x_blocks, x_ring, full, empty, first_k = inputs
    STAGES: gl.constexpr = x_ring.shape[0]
    ROWS: gl.constexpr = x_ring.shape[1]
    first_m = gl.program_id(0) * ROWS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), ROWS * BLOCK * 2)
        tma.async_copy_global_to_shared(
            x_blocks, [first_m, first_k + step * BLOCK], full.index(stage), x_ring.index(stage)
        )


@gluon.jit
def _copy_weight(
    weight, GROUP: gl.constexpr, GROUPS: gl.constexpr, OUT_GROUPS: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    """Run a warp that copies blocks of codes, with the words of their scales."""
    w_blocks, s_blocks, w_ring, s_ring, full, empty, first_k = weight
    STAGES: gl.constexpr = w_ring.shape[0] // OUT_GROUPS
    s_rows = s_ring._reinterpret(s_ring.dtype, [STAGES * OUT_GROUPS * GROUPS, 1, OUTS], s_blocks.layout)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), OUT_GROUPS * OUTS * (BLOCK // 2 + 4 * GROUPS))
        k = first_k + step * BLOCK
        for part in gl.static_range(OUT_GROUPS):
            place = stage * OUT_GROUPS + part
            first_n = (gl.program_id(1) * OUT_GROUPS + part) * OUTS
            tma.async_copy_global_to_shared(w_blocks, [first_n, k // 2], full.index(stage), w_ring.index(place))
            for i in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    s_blocks,
                    [(k + BLOCK // GROUPS * i) // GROUP, first_n],
                    full.index(stage),
                    s_rows.index(place * GROUPS + i),
                )


@gluon.jit
def _multiply(
    NUMBER: gl.constexpr, memory, N: gl.constexpr, E2M1: gl.constexpr, OUT_GROUPS: gl.constexpr,
    COLUMN_GROUPS: gl.constexpr, SHARES: gl.constexpr, STEPS: gl.constexpr, HAS_BIAS: gl.constexpr, ADD: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Run four warps that multiply OUTS outputs of ROWS rows by every COLUMN_GROUPS-th block; the first group of each
    OUTS also completes them.
    """
    (
        x_ring, w_ring, s_ring, x_full, x_empty, w_full, w_empty, others, others_full, bias_ptr, factors_ptr, out_ptr,
        parts_ptr, arrived_ptr, rows, out_stride,
    ) = memory  # fmt: skip
    ROWS: gl.constexpr = x_ring.shape[1]
    X_STAGES: gl.constexpr = x_ring.shape[0]
    W_STAGES: gl.constexpr = w_ring.shape[0] // OUT_GROUPS
    DTYPE: gl.constexpr = x_ring.dtype
    PART: gl.constexpr = NUMBER // COLUMN_GROUPS
    TURN: gl.constexpr = NUMBER % COLUMN_GROUPS
    UNROLL: gl.constexpr = 2 if STEPS % (2 * COLUMN_GROUPS) == 0 else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    sums = gl.zeros([OUTS, ROWS], gl.float32, mma)
    codes, words = _read(w_ring, s_ring, w_full, TURN * OUT_GROUPS + PART, TURN, 0, E2M1)
    w = _widen(codes, words, DTYPE, left, E2M1)
    mbarrier.arrive(w_empty.index(TURN), count=1)
    for first in range(TURN, STEPS, COLUMN_GROUPS * UNROLL):
        for i in gl.static_range(UNROLL):
            # Read the next block before this one is multiplied, and widen it meanwhile. The last is read again.
            step = first + i * COLUMN_GROUPS
            following = gl.minimum(step + COLUMN_GROUPS, STEPS - COLUMN_GROUPS + TURN)
            stage = following % W_STAGES
            phase = (following // W_STAGES) & 1
            codes, words = _read(w_ring, s_ring, w_full, stage * OUT_GROUPS + PART, stage, phase, E2M1)
            mbarrier.wait(x_full.index(step % X_STAGES), (step // X_STAGES) & 1)
            product = hopper.warpgroup_mma(w, x_ring.index(step % X_STAGES).permute((1, 0)), sums, is_async=True)
            later = _widen(codes, words, DTYPE, left, E2M1)
            sums, w = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(product, w))
            mbarrier.arrive(x_empty.index(step % X_STAGES), count=1)
            mbarrier.arrive(w_empty.index(stage), count=1, pred=step < STEPS - COLUMN_GROUPS)
            w = later
    if TURN > 0:
        others.index(PART * (COLUMN_GROUPS - 1) + TURN - 1).store(sums)
        mbarrier.arrive(others_full.index(PART * (COLUMN_GROUPS - 1) + TURN - 1), count=1)
    else:
        for i in gl.static_range(COLUMN_GROUPS - 1):
            mbarrier.wait(others_full.index(PART * (COLUMN_GROUPS - 1) + i), 0)
            sums += others.index(PART * (COLUMN_GROUPS - 1) + i).load(mma)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        last = True
        if SHARES > 1:
            cell = gl.expand_dims(gl.arange(0, OUTS, gl.SliceLayout(1, mma)) * ROWS, 1)
            cell += gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, mma)), 0)
            tile = (gl.program_id(1) * OUT_GROUPS + PART) * gl.num_programs(0) + gl.program_id(0)
            parts = parts_ptr + tile * (SHARES * OUTS * ROWS) + cell
            gl.store(parts + gl.program_id(2) * (OUTS * ROWS), sums)
            thread_barrier()  # all threads have written before one of them counts
            last = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SHARES - 1
            if last:
                gl.store(arrived_ptr + tile, 0)
                sums = gl.zeros([OUTS, ROWS], gl.float32, mma)
                for i in gl.static_range(SHARES):
                    sums += gl.load(parts + i * (OUTS * ROWS), cache_modifier=".cg")
        if last:
            lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            result = gl.convert_layout(gl.permute(sums, (1, 0)), lines)
            m = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, lines))
            n = (gl.program_id(1) * OUT_GROUPS + PART) * OUTS + gl.arange(0, OUTS, gl.SliceLayout(0, lines))
            if E2M1:
                result *= gl.expand_dims(gl.load(factors_ptr + n, mask=n < N, other=0.0), 0)
            if HAS_BIAS:
                result += gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 0)
            at = out_ptr + gl.expand_dims(m.to(gl.int64) * out_stride, 1) + gl.expand_dims(n, 0)
            inside = gl.expand_dims(m < rows, 1) & gl.expand_dims(n < N, 0)
            if ADD:
                result += gl.load(at, mask=inside, other=0.0).to(gl.float32)
            gl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["rows"])
def int4_bulk_kernel(
    x_blocks,
    w_blocks,
    s_blocks,
    bias_ptr,
    factors_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    out_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    E2M1: gl.constexpr,
    ROWS: gl.constexpr,
    OUT_GROUPS: gl.constexpr,
    COLUMN_GROUPS: gl.constexpr,
    SHARES: gl.constexpr,
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ADD: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Compute, in program (m, n, share), ROWS rows and OUT_GROUPS * OUTS outputs over a share of the K columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    STEPS: gl.constexpr = K // BLOCK // SHARES
    GROUPS: gl.constexpr = 2 if E2M1 else 4 if GROUP < BLOCK else 1
    OTHERS: gl.constexpr = OUT_GROUPS * (COLUMN_GROUPS - 1)
    x_ring = gl.allocate_shared_memory(x_blocks.dtype, [X_STAGES, ROWS, BLOCK], x_blocks.layout)
    w_ring = gl.allocate_shared_memory(w_blocks.dtype, [W_STAGES * OUT_GROUPS, OUTS, BLOCK // 2], w_blocks.layout)
    s_ring = gl.allocate_shared_memory(s_blocks.dtype, [W_STAGES * OUT_GROUPS, GROUPS, OUTS], s_blocks.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=OUT_GROUPS)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=OUT_GROUPS)
    others, others_full = x_ring, x_full
    if OTHERS > 0:
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, ROWS // 8), [1, 0])
        others = gl.allocate_shared_memory(gl.float32, [OTHERS, OUTS, ROWS], swizzled)
        others_full = gl.allocate_shared_memory(gl.int64, [OTHERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(OTHERS):
            mbarrier.init(others_full.index(i), count=1)
    hopper.fence_async_shared()
    first_k = gl.program_id(2) * (STEPS * BLOCK)
    memory = (
        x_ring, w_ring, s_ring, x_full, x_empty, w_full, w_empty, others, others_full, bias_ptr, factors_ptr, out_ptr,
        parts_ptr, arrived_ptr, rows, out_stride,
    )  # fmt: skip
    inputs = (x_blocks, x_ring, x_full, x_empty, first_k)
    weight = (w_blocks, s_blocks, w_ring, s_ring, w_full, w_empty, first_k)
    if OUT_GROUPS * COLUMN_GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (gl.constexpr(0), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_copy_inputs, (inputs, STEPS, OVERLAP)),
                (_copy_weight, (weight, GROUP, GROUPS, OUT_GROUPS, STEPS)),
            ],
            [1, 1], [_COPYING, _COPYING],
        )  # fmt: skip
    elif OUT_GROUPS * COLUMN_GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (gl.constexpr(0), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_multiply, (gl.constexpr(1), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_copy_inputs, (inputs, STEPS, OVERLAP)),
                (_copy_weight, (weight, GROUP, GROUPS, OUT_GROUPS, STEPS)),
            ],
            [4, 1, 1], [REGISTERS, _COPYING, _COPYING],
        )  # fmt: skip
    elif OUT_GROUPS * COLUMN_GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (gl.constexpr(0), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_multiply, (gl.constexpr(1), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_multiply, (gl.constexpr(2), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_copy_inputs, (inputs, STEPS, OVERLAP)),
                (_copy_weight, (weight, GROUP, GROUPS, OUT_GROUPS, STEPS)),
            ],
            [4, 4, 1, 1], [REGISTERS, REGISTERS, _COPYING, _COPYING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (gl.constexpr(0), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_multiply, (gl.constexpr(1), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_multiply, (gl.constexpr(2), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_multiply, (gl.constexpr(3), memory, N, E2M1, OUT_GROUPS, COLUMN_GROUPS, SHARES, STEPS, HAS_BIAS,
                             ADD, OVERLAP)),
                (_copy_inputs, (inputs, STEPS, OVERLAP)),
                (_copy_weight, (weight, GROUP, GROUPS, OUT_GROUPS, STEPS)),
            ],
            [4, 4, 4, 1, 1], [REGISTERS, REGISTERS, REGISTERS, _COPYING, _COPYING],
        )  # fmt: skip


def bulk_supports(weight: PackedInt4) -> bool:
    """Return True if `int4_bulk_product` multiplies by this weight on its device."""
    return (
        HAS_GLUON
        and weight.codes.is_cuda
        and torch.cuda.get_device_capability(weight.codes.device)[0] == 9
        and len(weight.codes) % _ALIGNED_ELEMENTS == 0
    )


def int4_bulk_product(
    x: torch.Tensor,
    weight: PackedInt4,
    config: BulkConfig,
    parts: Parts,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias + residual [M, N], for a weight that `bulk_supports`; else as `int4_tile_product`."""
    rows, outs, blocks = len(x), len(weight.codes), weight.padded // BLOCK_COLUMNS
    assert x.is_contiguous() and blocks % (config.shares * config.column_groups) == 0
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if residual is None else residual
    assert out.stride(1) == 1
    grid = (cdiv(rows, config.block_m), cdiv(outs, WEIGHT_TILE_ROWS * config.out_groups), config.shares)
    parts.check_room(grid[0] * grid[1] * config.out_groups, config.shares, config.block_m * WEIGHT_TILE_ROWS)
    int4_bulk_kernel[grid](
        BulkDescriptor.from_tensor(x, [config.block_m, BLOCK_COLUMNS], _X_LAYOUT),
        BulkDescriptor.from_tensor(weight.codes.view(torch.uint8), [WEIGHT_TILE_ROWS, BLOCK_COLUMNS // 2], _W_LAYOUT),
        BulkDescriptor.from_tensor(weight.scales, [1, WEIGHT_TILE_ROWS], _SCALES_LAYOUT),
        out if bias is None else bias,
        out if weight.factors is None else weight.factors,
        out,
        parts.sums,
        parts.arrived,
        rows,
        out.stride(0),
        N=outs,
        K=weight.padded,
        GROUP=weight.group,
        E2M1=weight.factors is not None,
        ROWS=config.block_m,
        OUT_GROUPS=config.out_groups,
        COLUMN_GROUPS=config.column_groups,
        SHARES=config.shares,
        X_STAGES=config.x_stages,
        W_STAGES=config.w_stages,
        REGISTERS=config.registers,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        num_warps=4,
        maxnreg=config.max_registers,
        **early_start.options(x.device),
    )
    return out
