"""Layer of experts for a handful of tokens: the norm, the router, the chosen experts and the sum of their results.

At so few tokens the cost of the layer is reading the chosen experts. There are three launches, none of which sorts. The
first computes the router's logits. The second computes gate and up, with a program for each slice of a token's expert,
which finds its expert in the logits by itself. The third computes down, with a program for a few outputs of a token
over all of its experts. So nothing is combined across programs: the sum over experts has one order, and a token's
result does not depend on the other tokens. Neighbouring programs read an expert that two tokens chose, so the second
one finds it in the L2 cache.

The GPU keeps reading between launches: down starts while gate and up still run, and reads its weight, which depends
only on the logits.
"""

from dataclasses import dataclass
from typing import Any

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES, SCALE_BLOCK
from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS, codes_by_columns, e2m1_numbers, widen_mxfp4
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2
from roseinfer.kernels.experts.code_order import FOUR_BITS
from roseinfer.kernels.experts.few_tokens_configs import FewConfig, choose_few_config
from roseinfer.kernels.experts.few_tokens_kernel import down_kernel, gate_up_kernel
from roseinfer.kernels.experts.route import route_reference, router_logits
from roseinfer.kernels.linear.activation import gated_reference
from roseinfer.kernels.linear.skinny import SkinnyNorm

# Above this nearly all experts are read, and programs of one token each would read them repeatedly.
MAX_TOKENS = 16
# The most pairs of a token and an expert, for each 8 experts, with which these kernels are faster than tiles; in FP8
# also the most in all (H200, torch 2.11, Triton 3.6; 2026-11-28; docs/research/2026-11-kernels.md has the times).
_MAX_PAIRS_OF_8_EXPERTS = {"none": 4, "channel": 4, "block": 4, "mxfp4": 4, "int4": 3, "nvfp4": 3}
_MAX_FP8_PAIRS = 112
# Columns of a load of 16 bytes.
_GROUP_COLUMNS = {"none": 8, "channel": 16, "block": 16, "mxfp4": 32, "int4": 32, "nvfp4": 32}


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of a layer's experts, contiguous.

    gate_up: [E, 2 * I, H], each expert's gate, then its up. down: [E, H, I]. Both are bfloat16 or float16, or
    float8_e4m3fn with float32 scales to multiply by: [E, 2 * I] and [E, H] (channels), or [E, 2 * I / 128, H / 128] and
    [E, H / 128, I / 128] (blocks; I and H are multiples of 128). In four bits they are as in `Stack`, both alike; I and
    H are multiples of 32. Biases, and factors in NVFP4: [E, 2 * I] and [E, H].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_factors: torch.Tensor | None = None
    down_factors: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """I, the size of an expert's hidden layer."""
        return self.gate_up.shape[1] // 2

    @property
    def scaled(self) -> str:
        """Unit with a scale of its own: "none", "channel" or "block"; or "mxfp4", "int4" or "nvfp4"."""
        if self.gate_up_scales is None:
            return "none"
        if self.has_four_bits:
            return FOUR_BITS[self.gate_up_scales.dtype]
        return "channel" if self.gate_up_scales.ndim == 2 else "block"

    @property
    def has_four_bits(self) -> bool:
        return self.gate_up.dtype is torch.uint8

    def widened(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate_up and down themselves in `dtype`."""
        gate_up = _widened(self.gate_up, self.gate_up_scales, self.gate_up_factors)
        return gate_up.to(dtype), _widened(self.down, self.down_scales, self.down_factors).to(dtype)


def _widened(weight: torch.Tensor, scales: torch.Tensor | None, factors: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return weight
    if scales.dtype is torch.uint8:
        return widen_mxfp4(weight, scales, torch.float32)
    if factors is not None:
        uppers = scales[..., None].view(torch.uint8).to(torch.int16) << 7  # of each half of a block
        numbers = e2m1_numbers(codes_by_columns(weight)).unflatten(-1, (2, -1)) * uppers.view(torch.float16)[..., None]
        return numbers.flatten(-3) * (factors[:, :, None] * 2.0**-14)
    if weight.dtype is torch.uint8:
        scale, shift = (
            scales[..., None]
            .view(torch.float16)
            .float()
            .repeat_interleave(scale_columns(2 * weight.shape[2], scales), 2)
            .unbind(-1)
        )
        return (codes_by_columns(weight).flatten(-2).float() - 8) * scale + shift
    if scales.ndim == 2:
        return weight.float() * scales[:, :, None]
    return weight.float() * scales.repeat_interleave(SCALE_BLOCK, 1).repeat_interleave(SCALE_BLOCK, 2)


def experts_reference(
    x: torch.Tensor,
    norm: SkinnyNorm,
    router: torch.Tensor,
    weights: ExpertWeights,
    *,
    top_k: int,
    renormalise: bool,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    router_bias: torch.Tensor | None = None,
    shared: bool = False,
) -> torch.Tensor:
    """`experts_few` in plain torch, in x's dtype."""
    normed = torch.nn.functional.rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps).to(x.dtype)
    routed = route_reference(x, norm, router, top_k, renormalise, router_bias, shared)
    gate_up, down = weights.widened(x.dtype)
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (ids, shares) in enumerate(zip(routed.ids, routed.weights, strict=True)):
        for expert, share in zip(ids.tolist(), shares, strict=True):
            between = normed[token] @ gate_up[expert].T
            hidden = gated_reference(_biased(between, weights.gate_up_bias, expert), activation)
            result[token] += share * _biased(hidden @ down[expert].T, weights.down_bias, expert).float()
    return (result if residual is None else result + residual.float()).to(x.dtype)


def _biased(x: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    return x if bias is None else x + bias[expert]


def few_pays(tokens: int, weights: ExpertWeights, top_k: int) -> bool:
    """Return True if `experts_few` supports so many tokens for these weights, and is faster than tiles.

    Tiles are of tokens that share an expert; few tokens pay here while most chosen experts have one token.
    """
    pairs, experts = tokens * top_k, weights.down.shape[0]
    if not few_supports(tokens, weights) or (weights.down.dtype is CODES and pairs > _MAX_FP8_PAIRS):
        return False
    return 8 * pairs <= _MAX_PAIRS_OF_8_EXPERTS[weights.scaled] * experts


def few_supports(tokens: int, weights: ExpertWeights) -> bool:
    """Return True if `experts_few` supports so many tokens for these weights."""
    (count, hidden), width, matrices = weights.down.shape[:2], weights.width, (weights.gate_up, weights.down)
    packed = 2 if weights.has_four_bits else 1
    shapes = [(count, 2 * width, hidden // packed), (count, hidden, width // packed)]
    if not 1 <= tokens <= MAX_TOKENS or [matrix.shape for matrix in matrices] != shapes:
        return False
    if not all(matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 for matrix in matrices):
        return False
    if weights.has_four_bits:
        return hidden % BLOCK_ELEMENTS == 0 and width % BLOCK_ELEMENTS == 0 and weights.down.dtype is torch.uint8
    if weights.scaled == "none":
        return weights.down.dtype in (torch.bfloat16, torch.float16) and hidden % 8 == 0 and width % 8 == 0
    multiple = SCALE_BLOCK if weights.scaled == "block" else 16
    scales = weights.gate_up_scales, weights.down_scales
    if not all(scale is not None and scale.dtype is torch.float32 and scale.is_contiguous() for scale in scales):
        return False
    return weights.down.dtype is CODES and hidden % multiple == 0 and width % multiple == 0


def experts_few(
    x: torch.Tensor,
    norm: SkinnyNorm,
    router: torch.Tensor,
    weights: ExpertWeights,
    *,
    top_k: int,
    renormalise: bool,
    activation: str = "silu",
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: FewConfig | None = None,
    router_bias: torch.Tensor | None = None,
    shared: bool = False,
) -> torch.Tensor:
    """Return residual + the sum over each token's `top_k` experts e of share_e * down_e(activation(gate_e(y)) *
    up_e(y)).

    y = norm(x), and shares are those of `route`.

    x: [T, H], T <= 16, its rows may be apart. norm: an RMSNorm. router: [E, H]. residual: [T, H], may be x. out: [T,
    H], may be the residual, and x if that is the residual. weights: supported by `few_supports`. router_bias: [E]
    float32. shared: the last expert is none to choose: all tokens have it, with the sigmoid of its logit as share. Sums
    are float32; the hidden layer is rounded to x's dtype, and the result once.

    Starts early (see `early_start`): x and the residual may be the preceding kernel's results, all else must be older.
    """
    (tokens, width), (count, hidden) = x.shape, router.shape
    inner, count, places = weights.width, count - shared, top_k + shared
    assert x.stride(1) == 1 and width == hidden and top_k <= count and few_supports(tokens, weights)
    assert not (shared and router_bias is not None)
    config = config or choose_few_config(tokens, top_k, hidden, inner, weights.scaled)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device) if out is None else out
    logits, rstd = router_logits(x, norm, router, router_bias)
    between = torch.empty((tokens * places, inner), dtype=x.dtype, device=x.device)
    common: dict[str, Any] = {
        "E": count,
        "E_PAD": next_power_of_2(count),
        "TOP_K": top_k,
        "SHARED": shared,
        "H": hidden,
        "WIDTH": inner,
        "SCALES": weights.scaled,
        "GROUP": _GROUP_COLUMNS[weights.scaled],
        "EVICTION": "evict_first" if config.evict_first else "",
        "COMPILED": x.is_cuda,
    } | early_start.options(x.device)
    cut = config.gate_up
    # With scales by blocks a lane loads only those of its groups.
    lanes = min(cut.lanes, 8 if weights.scaled == "block" else cut.block_k // _GROUP_COLUMNS[weights.scaled])
    assert cut.block_n * lanes >= 32, "a warp has threads without rows"
    gate_up_kernel[(tokens * places, cdiv(inner, cut.block_n * cut.tiles))](
        x,
        norm.weight,
        logits,
        rstd,
        weights.gate_up,
        weights.gate_up_scales,
        weights.gate_up_bias,
        between,
        x.stride(0),
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        LANES=lanes,
        TILES=cut.tiles,
        SCALE_COLUMNS=scale_columns(hidden, weights.gate_up_scales),
        STAGES=cut.stages,
        ACTIVATION=activation,
        HAS_BIAS=weights.gate_up_bias is not None,
        factors_ptr=weights.gate_up_scales if weights.scaled == "channel" else weights.gate_up_factors,
        num_warps=cut.warps,
        **common,
    )
    cut, padded = config.down, next_power_of_2(top_k)
    down_kernel[(tokens, cdiv(hidden, cut.block_n))](
        between,
        logits,
        weights.down,
        weights.down_scales,
        weights.down_bias,
        residual,
        out,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K_PAD=padded,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        SHARED_BLOCK_K=min(cut.block_k * padded, next_power_of_2(inner)),
        AHEAD=min(cut.ahead, cdiv(inner, cut.block_k)),
        RENORMALISE=renormalise,
        SCALE_COLUMNS=scale_columns(inner, weights.down_scales),
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=weights.down_bias is not None,
        factors_ptr=weights.down_scales if weights.scaled == "channel" else weights.down_factors,
        num_warps=cut.warps,
        **common,
    )
    return out


def scale_columns(columns: int, scales: torch.Tensor | None) -> int:
    """Return how many of a row's columns share a scale. scales: [E, rows, groups]; all other forms have one."""
    return columns if scales is None or scales.ndim < 3 else columns // scales.shape[2]
