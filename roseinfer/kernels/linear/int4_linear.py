"""Linear layers for a handful of rows by weights in four bits, with the operations around them fused in.

As `skinny_linear` does it, whose rules hold here, too: programs take a few rows of the weight over the whole width, so
results are deterministic, and a row's result does not depend on the other rows of the batch. A row or two are
multiplied in pairs of float16 (`skinny_int4`), more on the matrix units, to whose 16 bits weights are widened in
registers (`skinny_direct`). There the norm is a kernel of its own, during which the product loads its weight.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.gluon_support import HAS_GLUON
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.linear.int4_bulk import bulk_supports
from roseinfer.kernels.linear.int4_codes import PackedInt4
from roseinfer.kernels.linear.skinny import MAX_ROWS, SkinnyNorm, direct_linear, normed, processors
from roseinfer.kernels.linear.skinny_configs import DirectConfig
from roseinfer.kernels.linear.skinny_int4 import skinny_int4_kernel
from roseinfer.kernels.linear.skinny_int4_configs import Int4Config, choose_int4_config, pairs_rule
from roseinfer.kernels.lora.fused import launch_options, leading_programs
from roseinfer.kernels.lora.slots import SlotRows

# Where a kernel for more rows reads the weight in bulk, it is faster from here on, even with the operations around it.
_MAX_ROWS_BESIDE_BULK = 8


def pays(rows: int, weight: PackedInt4, gated: bool) -> bool:
    """Return True if `int4_linear` is the fastest product of `rows` rows by this weight."""
    most = _MAX_ROWS_BESIDE_BULK if bulk_supports(weight) else MAX_ROWS
    return 1 <= rows <= most and _choose(rows, weight, gated) is not None


def _choose(rows: int, weight: PackedInt4, gated: bool) -> Int4Config | None:
    direct, nvfp4 = HAS_GLUON and weight.codes.is_cuda, weight.factors is not None
    bucket = next_power_of_2(rows)
    return choose_int4_config(bucket, len(weight.codes), weight.padded, gated, nvfp4=nvfp4, direct=direct)


def int4_linear(
    x: torch.Tensor,
    weight: PackedInt4,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: SkinnyNorm | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    delta: SlotRows | None = None,
    overlap: bool = False,
    config: Int4Config | None = None,
) -> torch.Tensor:
    """Return activation(norm(x) @ weight.T + bias) + residual; gated: activation(gate) * up.

    x: [M, in] in 16 bits, 1 <= M <= 16. All others: as in `skinny_linear`.
    """
    rows, in_features = x.shape
    width = len(weight.codes) // (2 if gated else 1)
    assert weight.columns == in_features and x.stride(1) == 1
    assert not gated or residual is None
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if config is None:
        config = _choose(rows, weight, gated) or pairs_rule(len(weight.codes), weight.padded, gated)
    overlap = overlap and early_start.capable(x.device)
    if isinstance(config, DirectConfig):
        return direct_linear(normed(x, norm), weight, bias, residual, activation, gated, out, overlap, config, delta)
    if norm is not None and norm.kind == "layer":
        x, norm = normed(x, norm), None
    tiles = cdiv(width, config.block_n)
    programs = min(tiles, (config.programs or tiles) * processors(x.device))
    skinny_int4_kernel[(leading_programs(rows, delta) + programs,)](
        x,
        weight.codes,
        weight.scales,
        bias,
        residual,
        None if norm is None else norm.weight,
        out,
        rows,
        width,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0.0 if norm is None else norm.eps,
        ROWS=next_power_of_2(rows),
        K=in_features,
        GROUP=weight.group,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        EVICTION="evict_first" if config.evict_first else "",
        NORM=norm is not None,
        ACTIVATION=activation or "none",
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        OVERLAP=overlap,
        STAY=programs < tiles,
        COMPILED=x.is_cuda,
        factors_ptr=weight.factors,
        num_warps=config.warps,
        **({"launch_pdl": True} if overlap else {}),
        **launch_options(x, delta),
    )
    return out
