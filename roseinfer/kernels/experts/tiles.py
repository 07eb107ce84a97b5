"""Experts of many tokens: pairs of token and expert are sorted by expert, and multiplied in tiles.

There are three products a layer, where a tile of rows belongs to one expert: gate and up with the activation between
them, down with the weight of the pair, and the sum of a token's experts, always in the same order. Numbers of rows are
read on the device and grids are upper bounds, so a graph can capture all of it. A row's result does not depend on the
other rows, nor on its place in the sorted order.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES, SCALE_BLOCK
from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tensor_descriptor
from roseinfer.kernels.experts.code_order import FOUR_BITS
from roseinfer.kernels.experts.pair_order import Order
from roseinfer.kernels.experts.tile_configs import ExpertsConfig, ProductConfig
from roseinfer.kernels.experts.tile_kernels import down_kernel, gate_up_kernel, spread_kernel, sum_kernel
from roseinfer.kernels.linear.fp8_rows import Fp8Rows

# Bytes of an expert's weight that the programs of all its tiles use before the next outputs: they are read from memory
# once, and for further tiles from the L2 cache.
_SHARED_BYTES = 8 << 20
# Up to so many tokens the kernel after `add_experts` starts while that runs, to read its weight meanwhile.
_MAX_EARLY_TOKENS = 256
# The most columns of a program of `add_experts` and `spread`.
_PROGRAM_COLUMNS = 2048


class Stack(NamedTuple):
    """One matrix of every expert.

    weights: [E, N, K], contiguous, at a multiple of 16 bytes, bfloat16 or float16, or codes (float8_e4m3fn). scales:
    float32, contiguous: [E, N] or [E, N / 128, K / 128] for codes; else None. K is a multiple of 8; with codes, of 128,
    as is N if blocks have scales. Four bits are uint8 [E, N, K / 2] in the order of `mxfp4_codes`, with K a multiple of
    32. In MXFP4 scales are uint8 [E, N, K / 32], and in int4 words of a scale and a shift, int32 [E, N, K / group], for
    groups of 32, 64, 128 or K columns. In NVFP4 they are words of `nvfp4_weights`, int16 [E, N, K / 32], with float32
    factors [E, N] of rows. bias: [E, N], contiguous.
    """

    weights: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @property
    def scaled_by(self) -> str:
        if self.scales is None:
            return "none"
        if self.has_four_bits:
            return FOUR_BITS[self.scales.dtype]
        return "block" if self.scales.ndim == 3 else "channel"

    @property
    def has_four_bits(self) -> bool:
        return self.weights.dtype is torch.uint8

    @property
    def has_codes(self) -> bool:
        """True for codes of 8 bits, by which codes are multiplied."""
        return self.weights.dtype is CODES

    @property
    def columns(self) -> int:
        """K, the inputs of the matrix."""
        return self.weights.shape[2] * (2 if self.has_four_bits else 1)

    @property
    def group(self) -> int:
        """Number of columns in four bits that share a scale, or in NVFP4 a word of scales; 0 for other matrices."""
        return self.columns // self.scales.shape[2] if self.has_four_bits and self.scales is not None else 0

    @property
    def row_factors(self) -> torch.Tensor | None:
        """Factors [E, N] of results."""
        return self.scales if self.scaled_by == "channel" else self.factors

    def blocks(self, cut: ProductConfig) -> object:
        """Return a descriptor for the copy engine."""
        matrix = self.weights.flatten(0, 1)
        if self.has_four_bits:
            return tensor_descriptor(matrix.view(torch.int32), cut.block_n, cut.block_k // 8)
        return tensor_descriptor(matrix, cut.block_n, cut.block_k)


def gate_up_product(
    x: torch.Tensor | Fp8Rows, gate_up: Stack, order: Order, top_k: int, activation: str, config: ExpertsConfig
) -> torch.Tensor | Fp8Rows:
    """Return activation(x @ gate.T) * (x @ up.T) [P, I] of each pair's token and expert, in the order of `order.pairs`.
    A bias is added to both products.

    x: [T, H], its rows may be apart, or, with `config.spread`, [P, H] from `spread`. gate_up: [E, 2 I, H], gate first.
    For a weight in codes x and the result are `Fp8Rows` with a scale for each group, and I is a multiple of 128. Needs
    compute capability 9.0.
    """
    outs, columns = gate_up.weights.shape[1], gate_up.columns
    width, pairs, cut = outs // 2, order.pairs.shape[0], config.gate_up
    codes, scales = _codes(x)
    _check(gate_up, codes, cut, config)
    h: torch.Tensor | Fp8Rows
    if not gate_up.has_codes:
        h = torch.empty((pairs, width), dtype=codes.dtype, device=codes.device)
    else:
        assert width % SCALE_BLOCK == 0 and cut.block_n == SCALE_BLOCK
        h = Fp8Rows.empty(pairs, width, True, codes.device)
    h_codes, h_scales = _codes(h)
    gate_up_kernel[_grid(width, 2, gate_up, order, cut)](
        tensor_descriptor(codes, config.tile, cut.block_k) if config.spread else codes,
        scales,
        gate_up.blocks(cut),
        gate_up.scales,
        gate_up.bias,
        order.pairs,
        order.tiles,
        h_codes,
        h_scales,
        order.places,
        codes.stride(0),
        0 if scales is None else scales.stride(1),
        0 if h_scales is None else h_scales.stride(1),
        TOP_K=top_k,
        N=width,
        K=columns,
        GROUP=gate_up.group,
        BLOCK_M=config.tile,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        STAGES=cut.stages,
        SCALES=gate_up.scaled_by,
        ACTIVATION=activation,
        HAS_BIAS=gate_up.bias is not None,
        WEIGHT_FIRST=config.weight_first,
        GATHER=not config.spread,
        HALVES=config.halves,
        COMPILED=codes.is_cuda,
        factors_ptr=gate_up.row_factors,
        num_warps=cut.warps,
        **early_start.options(codes.device),
    )
    return h


def down_product(
    h: torch.Tensor | Fp8Rows,
    down: Stack,
    order: Order,
    weights: torch.Tensor,
    config: ExpertsConfig,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return weights * (h @ down.T + bias) [P, H] of `dtype`, in the order of tokens.

    h: from `gate_up_product`. down: [E, H, I]. weights: [T, k] float32, contiguous.
    """
    outs, columns = down.weights.shape[1], down.columns
    pairs, cut = order.pairs.shape[0], config.down
    codes, scales = _codes(h)
    _check(down, codes, cut, config)
    assert weights.dtype == torch.float32 and weights.is_contiguous() and weights.numel() == pairs
    out = torch.empty((pairs, outs), dtype=dtype, device=codes.device)
    down_kernel[_grid(outs, 1, down, order, cut)](
        tensor_descriptor(codes, config.tile, cut.block_k),
        tensor_descriptor(codes, config.tile // 2, cut.block_k) if config.halves else None,
        scales,
        down.blocks(cut),
        down.scales,
        down.bias,
        order.pairs,
        order.tiles,
        weights,
        out,
        order.places,
        0 if scales is None else scales.stride(1),
        N=outs,
        K=columns,
        GROUP=down.group,
        BLOCK_M=config.tile,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        STAGES=cut.stages,
        SCALES=down.scaled_by,
        HAS_BIAS=down.bias is not None,
        WEIGHT_FIRST=config.weight_first,
        HALVES=config.halves,
        COMPILED=codes.is_cuda,
        factors_ptr=down.row_factors,
        num_warps=cut.warps,
        **early_start.options(codes.device),
    )
    return out


def add_experts(parts: torch.Tensor, top_k: int, residual: torch.Tensor | None) -> torch.Tensor:
    """Return residual + the sum of each token's parts in their order [T, H]; a residual is overwritten.

    parts: [T * k, H], contiguous. residual: [T, H], its rows may be apart.
    """
    pairs, width = parts.shape
    tokens = pairs // top_k
    out = torch.empty((tokens, width), dtype=parts.dtype, device=parts.device) if residual is None else residual
    assert out.stride(1) == 1 and parts.is_contiguous()
    block = min(next_power_of_2(width), _PROGRAM_COLUMNS)
    sum_kernel[(tokens, cdiv(width, block))](
        parts,
        out,
        out.stride(0),
        TOP_K=top_k,
        N=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        EARLY=tokens <= _MAX_EARLY_TOKENS,
        num_warps=min(max(block // 256, 1), 8),
        **early_start.options(parts.device),
    )
    return out


def spread(x: torch.Tensor | Fp8Rows, order: Order, top_k: int) -> torch.Tensor | Fp8Rows:
    """Copy the rows of tokens to where their pairs are sorted [P, H]. x: [T, H], its rows may be apart."""
    codes, scales = _codes(x)
    pairs, width = order.pairs.shape[0], codes.shape[1]
    out: torch.Tensor | Fp8Rows
    if scales is None:
        out = torch.empty((pairs, width), dtype=codes.dtype, device=codes.device)
    else:
        out = Fp8Rows.empty(pairs, width, True, codes.device)
    out_codes, out_scales = _codes(out)
    spread_kernel[(pairs,)](
        codes.view(torch.uint8) if codes.dtype == CODES else codes,
        scales,
        order.pairs,
        out_codes.view(torch.uint8) if codes.dtype == CODES else out_codes,
        out_scales,
        codes.shape[0],
        codes.stride(0),
        0 if scales is None else scales.stride(1),
        0 if out_scales is None else out_scales.stride(1),
        TOP_K=top_k,
        N=width,
        BLOCK=min(next_power_of_2(width), _PROGRAM_COLUMNS),
        GROUPS=0 if scales is None else next_power_of_2(width // SCALE_BLOCK),
        num_warps=4,
        **early_start.options(codes.device),
    )
    return out


def _codes(x: torch.Tensor | Fp8Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (x.codes, x.scales) if isinstance(x, Fp8Rows) else (x, None)


def _check(stack: Stack, x: torch.Tensor, cut: ProductConfig, config: ExpertsConfig) -> None:
    columns = stack.columns
    assert x.shape[1] == columns and x.stride(1) == 1
    assert x.dtype == stack.weights.dtype or stack.has_four_bits
    assert config.tile >= (16 if config.weight_first else 64) and columns % 8 == 0
    if stack.has_four_bits:
        assert columns % BLOCK_ELEMENTS == 0 and cut.block_k % BLOCK_ELEMENTS == 0
    elif stack.scales is not None:
        assert columns % SCALE_BLOCK == 0 and cut.block_k == SCALE_BLOCK and cut.block_n <= SCALE_BLOCK
        assert stack.scaled_by == "channel" or stack.weights.shape[1] % SCALE_BLOCK == 0


def _grid(outs: int, matrices: int, stack: Stack, order: Order, cut: ProductConfig) -> tuple[int, int, int]:
    """Return the grid of a product. matrices: from how many a program reads a row for each of its outputs."""
    blocks = cdiv(outs, cut.block_n)
    row_bytes = matrices * stack.weights.stride(1) * stack.weights.element_size()
    together = min(blocks, max(1, _SHARED_BYTES // (cut.block_n * row_bytes)))
    return together, order.places, cdiv(blocks, together)
