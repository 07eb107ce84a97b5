"""Linear layers for a handful of rows, with the norm before them and the activation or residual after them fused in.

At 1 to 16 rows a linear layer is the reading of its weight. Each program takes a few rows of the weight over the whole
width, so nothing is combined across programs: results are deterministic, and a row's result does not depend on the
other rows of the batch (it may differ in the last bit between buckets of rows, which are compiled apart).

In a chain of such layers the gaps between kernels cost as much as the reading. With `overlap` a kernel starts while
its predecessor still runs (programmatic dependent launch, CUDA programming guide), reads its weight, which depends on
nothing, and only then waits for its input.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from roseinfer.kernels import early_start
from roseinfer.kernels.activation import activate_reference
from roseinfer.kernels.skinny_configs import SkinnyConfig, choose_config, rule
from roseinfer.kernels.skinny_kernel import skinny_kernel
from roseinfer.kernels.triton_support import cdiv, next_power_of_2

# Above this, the input no longer is small beside the weight, and the library's kernels are as fast.
MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class SkinnyNorm:
    """The norm applied to the input: RMSNorm without a bias, LayerNorm with one. weight, bias: [in]."""

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
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: SkinnyNorm | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`skinny_linear` in plain torch, rounding where separate layers would."""
    if norm is not None:
        wide = x.float()
        if norm.bias is None:
            wide = F.rms_norm(wide, wide.shape[-1:], norm.weight.float(), norm.eps)
        else:
            wide = F.layer_norm(wide, wide.shape[-1:], norm.weight.float(), norm.bias.float(), norm.eps)
        x = wide.to(x.dtype)
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = activate_reference(gate, activation) * up
    else:
        y = activate_reference(y, activation)
    if residual is not None:
        y = y + residual
    y = y.to(out_dtype or (x.dtype if out is None else out.dtype))
    return y if out is None else out.copy_(y)


def pays(rows: int, weight: torch.Tensor, gated: bool) -> bool:
    """Whether `skinny_linear` takes `rows` rows of input for this weight, and faster than the library's kernels."""
    return supports(rows, weight) and choose_config(next_power_of_2(rows), *weight.shape, gated) is not None


def supports(rows: int, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` takes `rows` rows of input for this weight."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous() or weight.data_ptr() % 16:
        return False
    return 1 <= rows <= MAX_ROWS


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: SkinnyNorm | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """activation(norm(x) @ weight.T + bias) + residual; gated: activation(gate) * up.

    x: [M, in], 1 <= M, the last dimension contiguous. weight: [out, in], one that `supports` takes; gated: the gate's
    rows, then the up projection's. bias: [weight's rows]. residual: [M, out], and `out` may be the same tensor.
    activation: None, "silu", "gelu" or "gelu_tanh". The result has x's dtype, or `out_dtype`, or is `out`, which must
    not share memory with x. Sums are float32 and rounded once.

    overlap: start before the stream's preceding kernel has ended (compute capability 9.0 and higher). Only `x` and
    `residual` may be that kernel's or an earlier one's results; everything else must be older.
    """
    rows, in_features = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.shape[1] == in_features and x.stride(1) == 1 and weight.is_contiguous()
    assert not gated or residual is None
    if out is None:
        out = torch.empty((rows, width), dtype=out_dtype or x.dtype, device=x.device)
    bucket = next_power_of_2(rows)
    if config is None:
        shape = (bucket, weight.shape[0], in_features, gated)
        config = choose_config(*shape) or rule(*shape)
    overlap = overlap and early_start.capable(x.device)
    prefetch = min(config.prefetch, in_features) if overlap and in_features % 8 == 0 else 0
    absent = weight  # stands for a pointer that is not read
    skinny_kernel[(cdiv(width, config.block_n),)](
        x,
        weight,
        absent if bias is None else bias,
        absent if residual is None else residual,
        absent if norm is None else norm.weight,
        absent if norm is None or norm.bias is None else norm.bias,
        out,
        rows,
        width,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0.0 if norm is None else norm.eps,
        ROWS=bucket,
        K=in_features,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        DOT=config.dot,
        SLICES=config.warps if config.dot else 1,
        STAGES=config.stages,
        PRELOAD=config.preload,
        PREFETCH=prefetch,
        EVICTION="evict_first" if config.evict_first else "",
        NORM="none" if norm is None else norm.kind,
        ACTIVATION=activation or "none",
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        OVERLAP=overlap,
        num_warps=config.warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out
