"""Linear layers for a handful of rows, with the norm before them and the activation or residual after them fused in.

At 1 to 16 rows the cost of a linear layer is reading its weight. Each program takes a few rows of the weight over the
whole width, so nothing is combined across programs. Results are deterministic, and a row's result does not depend on
the other rows of the batch (it may differ in the last bit between buckets of rows, which are compiled separately).

In a chain of such layers the gaps between kernels cost as much as the reading. With `overlap` a kernel starts while its
predecessor still runs (programmatic dependent launch, CUDA programming guide). It reads its weight, which depends on no
kernel, and only then waits for its input.

At 2 to 8 rows the norm may be a kernel of its own (`skinny_direct`), during which the product loads its weight: fused,
every program would compute it.

Weights in FP8 (e4m3) with scales halve the reading. They are widened in registers, exactly, and multiplied by inputs
that are not quantised. So all operations stay fused, and only the weight's own rounding is lost.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.availability import multiprocessors
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.gluon_support import HAS_GLUON
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.linear.activation import activate_reference
from roseinfer.kernels.linear.int4_codes import PackedInt4
from roseinfer.kernels.linear.norm import layer_norm, rms_norm
from roseinfer.kernels.linear.skinny_configs import DirectConfig, SkinnyConfig, choose_config, rule
from roseinfer.kernels.linear.skinny_direct import MIN_TILE_ROWS, PIECE_COLUMNS, skinny_direct_kernel
from roseinfer.kernels.linear.skinny_fp8_configs import (
    MAX_PAIRS_REGISTERS,
    Fp8Config,
    PairsConfig,
    choose_fp8_config,
    fp8_rule,
    slices,
)
from roseinfer.kernels.linear.skinny_kernel import skinny_kernel
from roseinfer.kernels.linear.skinny_pairs import skinny_pairs_kernel
from roseinfer.kernels.linear.small_product import SmallProduct
from roseinfer.kernels.lora.fused import delta_reference, launch_options, leading_programs
from roseinfer.kernels.lora.slots import SlotRows

# Above this, the input is no longer small compared with the weight, and the library's kernels are as fast.
MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class SkinnyNorm:
    """Norm of the input: RMSNorm without a bias, LayerNorm with one. weight, bias: [in]."""

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        return "rms" if self.bias is None else "layer"


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: SkinnyNorm | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    delta: SlotRows | None = None,
) -> torch.Tensor:
    """`skinny_linear` in plain torch, rounding where separate layers would."""
    if norm is not None:
        wide = x.float()
        if norm.bias is None:
            wide = F.rms_norm(wide, wide.shape[-1:], norm.weight.float(), norm.eps)
        else:
            wide = F.layer_norm(wide, wide.shape[-1:], norm.weight.float(), norm.bias.float(), norm.eps)
        x = wide.to(x.dtype)
    y = F.linear(x, weight if scales is None else _widened(weight, scales, x.dtype), bias)
    if delta is not None:
        y = (y.float() + delta_reference(x, delta)).to(x.dtype)
    if gated:
        gate, up = y.chunk(2, -1)
        y = activate_reference(gate, activation) * up
    else:
        y = activate_reference(y, activation)
    if residual is not None:
        y = y + residual
    y = y.to(out_dtype or (x.dtype if out is None else out.dtype))
    return y if out is None else out.copy_(y)


def _widened(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if scales.ndim == 1:
        scales = scales[:, None]
    else:
        rows, columns = weight.shape
        scales = scales.repeat_interleave(SCALE_BLOCK, 0)[:rows].repeat_interleave(SCALE_BLOCK, 1)[:, :columns]
    return (weight.float() * scales).to(dtype)


def pays(rows: int, weight: torch.Tensor, gated: bool, scales: torch.Tensor | None = None) -> bool:
    """Return True if `skinny_linear` supports `rows` rows for this weight, and is faster than the library's kernels."""
    if not supports(rows, weight, gated, scales):
        return False
    return _choose(next_power_of_2(rows), weight, gated, scales) is not None


def takes_small(rows: int, weight: torch.Tensor, gated: bool, scales: torch.Tensor | None = None) -> bool:
    """Return True if a launch of `skinny_linear` for this weight may compute a `SmallProduct`, without LayerNorm."""
    if not supports(rows, weight, gated, scales):
        return False
    return isinstance(_choose(next_power_of_2(rows), weight, gated, scales), PairsConfig)


def supports(rows: int, weight: torch.Tensor, gated: bool = False, scales: torch.Tensor | None = None) -> bool:
    """Return True if `skinny_linear` supports `rows` rows of input for this weight."""
    if not weight.is_contiguous() or weight.data_ptr() % 16 or not 1 <= rows <= MAX_ROWS:
        return False
    if scales is None:
        return weight.dtype in (torch.bfloat16, torch.float16)
    if weight.dtype is not torch.float8_e4m3fn or scales.dtype is not torch.float32 or not scales.is_contiguous():
        return False
    return scales.ndim == 1 or not gated or weight.shape[0] % (2 * SCALE_BLOCK) == 0


def _choose(
    bucket: int, weight: torch.Tensor, gated: bool, scales: torch.Tensor | None
) -> Fp8Config | DirectConfig | None:
    if scales is None:
        return choose_config(bucket, *weight.shape, gated, direct=HAS_GLUON)
    return choose_fp8_config(bucket, *weight.shape, gated, blocks=scales.ndim == 2)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: SkinnyNorm | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    delta: SlotRows | None = None,
    small: SmallProduct | None = None,
    overlap: bool = False,
    config: Fp8Config | DirectConfig | None = None,
) -> torch.Tensor:
    """Return activation(norm(x) @ weight.T + bias) + residual; gated: activation(gate) * up.

    x: [M, in], 1 <= M, the last dimension contiguous. weight: [out, in], one that `supports` accepts; gated: the gate's
    rows, then the up projection's. scales: factors of a weight in float8_e4m3fn, float32, contiguous: [out], or
    [ceil(out / 128), ceil(in / 128)] for blocks of 128 x 128 (gated: the up projection begins with a block). bias:
    [weight's rows]. residual: [M, out], and `out` may be the same tensor. activation: None, "silu", "gelu" or
    "gelu_tanh". delta: slots of rows, whose adapters change the outputs before the activation; rows without one are as
    without it: the same bits, but for a rounding where the compiler fuses elementwise products with other additions.
    small: another product of norm(x), where `takes_small`. The result has x's dtype, or `out_dtype`, or is `out`, which
    must not share memory with x. Sums are float32 and rounded once.

    overlap: start before the stream's preceding kernel has ended (compute capability 9.0 and higher). Only `x` and
    `residual` may be results of that kernel or an earlier one; all other tensors must be older.
    """
    product = _Product(x, weight, scales, bias, residual, norm, activation, gated, delta, small)
    assert weight.shape[1] == x.shape[1] and x.stride(1) == 1 and weight.is_contiguous()
    assert not gated or residual is None
    within = gated and product.kind == "block" and product.width % SCALE_BLOCK
    assert not within, "the up projection begins within a block"
    if out is None:
        out = torch.empty((x.shape[0], product.width), dtype=out_dtype or x.dtype, device=x.device)
    config = product.usable(config)
    overlap = overlap and early_start.capable(x.device)
    if isinstance(config, DirectConfig):
        return direct_linear(normed(x, norm), weight, bias, residual, activation, gated, out, overlap, config, delta)
    if isinstance(config, PairsConfig):
        _launch_pairs(product, out, overlap, config)
    else:
        _launch(product, out, overlap, config)
    return out


class _Product(NamedTuple):
    """Arguments of `skinny_linear` that say what is multiplied."""

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    norm: SkinnyNorm | None
    activation: str | None
    gated: bool
    delta: SlotRows | None
    small: SmallProduct | None

    @property
    def kind(self) -> str:
        """Return what shares a scale: "channel", "block", or "none" without scales."""
        return "none" if self.scales is None else "channel" if self.scales.ndim == 1 else "block"

    @property
    def width(self) -> int:
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]

    @property
    def bucket(self) -> int:
        return next_power_of_2(self.x.shape[0])

    def usable(self, config: Fp8Config | DirectConfig | None) -> Fp8Config | DirectConfig:
        """Return this config, or the one for the shape, unless the product needs another kernel."""
        shape = self.bucket, *self.weight.shape, self.gated
        if config is None:
            default = rule if self.scales is None else fp8_rule
            config = _choose(self.bucket, self.weight, self.gated, self.scales) or default(*shape)
        assert not isinstance(config, DirectConfig) or self.scales is None
        if isinstance(config, PairsConfig) and self.norm is not None and self.norm.kind == "layer":
            config = fp8_rule(*shape)
        assert self.small is None or (isinstance(config, PairsConfig) and self.delta is None)
        return config

    def arguments(self, out: torch.Tensor) -> tuple[Any, ...]:
        """Return the positional arguments of both kernels."""
        x, norm, residual, absent = self.x, self.norm, self.residual, self.weight  # absent: pointers that are not read
        return (
            x,
            self.weight,
            absent if self.scales is None else self.scales,
            absent if self.bias is None else self.bias,
            absent if residual is None else residual,
            absent if norm is None else norm.weight,
            absent if norm is None or norm.bias is None else norm.bias,
            out,
            x.shape[0],
            self.width,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            0.0 if norm is None else norm.eps,
        )

    def options(self, config: Fp8Config, overlap: bool) -> dict[str, Any]:
        """Return the other arguments that both kernels have, and how to launch them."""
        return {
            "ROWS": self.bucket,
            "K": self.x.shape[1],
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.stages,
            "EVICTION": "evict_first" if config.evict_first else "",
            "NORM": "none" if self.norm is None else self.norm.kind,
            "ACTIVATION": self.activation or "none",
            "GATED": self.gated,
            "HAS_BIAS": self.bias is not None,
            "HAS_RESIDUAL": self.residual is not None,
            "OVERLAP": overlap,
            "SCALES": self.kind,
            "num_warps": config.warps,
            **({"launch_pdl": True} if overlap else {}),
            **launch_options(self.x, self.delta),
        }


def _launch_pairs(product: _Product, out: torch.Tensor, overlap: bool, config: PairsConfig) -> None:
    x, delta, small = product.x, product.delta, product.small
    tiles, leading = cdiv(product.width, config.block_n), leading_programs(x.shape[0], delta)
    programs = min(tiles, (config.programs or tiles) * processors(x.device))
    options = product.options(config, overlap) | {"STAY": programs < tiles, "COMPILED": x.is_cuda}
    if delta is not None:
        options["maxnreg"] = MAX_PAIRS_REGISTERS // config.warps
    if small is not None:
        options |= small.options()
        leading = small.programs
    skinny_pairs_kernel[(leading + programs,)](*product.arguments(out), **options)


def _launch(product: _Product, out: torch.Tensor, overlap: bool, config: SkinnyConfig) -> None:
    width_in = product.x.shape[1]
    ahead = config.prefetch if overlap and width_in * product.weight.itemsize % 16 == 0 else 0
    options = product.options(config, overlap) | {
        "DOT": config.dot,
        "SLICES": slices(config, blocks=product.kind == "block"),
        "PRELOAD": config.preload,
        "PREFETCH": min(ahead, width_in),
    }
    programs = leading_programs(product.x.shape[0], product.delta) + cdiv(product.width, config.block_n)
    skinny_kernel[(programs,)](*product.arguments(out), **options)


def direct_linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedInt4,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    gated: bool,
    out: torch.Tensor,
    overlap: bool,
    config: DirectConfig,
    delta: SlotRows | None,
) -> torch.Tensor:
    """Do as `skinny_linear` for an input after its norm."""
    rows, in_features = x.shape
    codes = isinstance(weight, PackedInt4)
    assert cdiv(in_features, PIECE_COLUMNS) * PIECE_COLUMNS % config.block_k == 0
    assert config.block_k % (PIECE_COLUMNS * config.warps) == 0 and (codes or in_features % config.block_k == 0)
    skinny_direct_kernel[(leading_programs(rows, delta) + cdiv(out.shape[1], config.block_n),)](
        x,
        weight.codes.view(torch.uint8) if codes else weight,
        weight.scales if codes else None,
        bias,
        residual,
        out,
        rows,
        out.shape[1],
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ROWS=max(MIN_TILE_ROWS, next_power_of_2(rows)),
        K=in_features,
        GROUP=weight.group if codes else 0,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        AHEAD=config.ahead,
        ACTIVATION=activation or "none",
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        OVERLAP=overlap,
        WARPS=config.warps,
        factors_ptr=weight.factors if codes else None,
        num_warps=config.warps,
        maxnreg=config.max_registers,
        **({"launch_pdl": True} if overlap else {}),
        **launch_options(x, delta),
    )
    return out


def normed(x: torch.Tensor, norm: SkinnyNorm | None) -> torch.Tensor:
    if norm is None:
        return x
    if norm.bias is None:
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def processors(device: torch.device) -> int:
    return multiprocessors(device) if device.type == "cuda" else 1  # under Triton's interpreter
