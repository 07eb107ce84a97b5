"""Layers of experts for kernels, and their exact results in float64."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.clamped_swish import clamped_swish
from roseinfer.kernels.common.mxfp4_codes import round_mxfp4
from roseinfer.kernels.experts.few_tokens import ExpertWeights
from roseinfer.kernels.experts.tiles import Stack
from roseinfer.kernels.linear.skinny import SkinnyNorm
from roseinfer.quant.int4_experts import expert_codes
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.nvfp4_experts import expert_stack
from roseinfer.quant.nvfp4_weight import Nvfp4Weight


def router_case(device: torch.device, tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs by name; some rows of x are large and off centre, so that a wrong norm shows."""
    x = torch.randn(tokens, hidden) * (1 + torch.arange(tokens))[:, None] + 0.5
    router = torch.randn(experts, hidden) * 2 * hidden**-0.5
    norm = SkinnyNorm((torch.randn(hidden) / 4 + 1).to(dtype).to(device), 1e-5)
    return {"x": x.to(dtype).to(device), "norm": norm, "router": router.to(dtype).to(device)}


def expert_weights(
    device: torch.device,
    experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    scaled: str = "none",
    *,
    biased: bool = False,
) -> ExpertWeights:
    """Return weights with scales by "channel" or "block" that differ by up to a hundredfold, or "mxfp4", "int4" or
    "nvfp4".
    """
    if biased:
        found = expert_weights(device, experts, hidden, width, dtype, scaled)
        biases = torch.randn(experts, 2 * width), torch.randn(experts, hidden)
        gate_up_bias, down_bias = (bias.to(dtype).to(device) for bias in biases)
        return replace(found, gate_up_bias=gate_up_bias, down_bias=down_bias)
    gate_up = torch.randn(experts, 2 * width, hidden) * hidden**-0.5
    down = torch.randn(experts, hidden, width) * width**-0.5
    if scaled == "none":
        return ExpertWeights(gate_up.to(dtype).to(device), down.to(dtype).to(device))
    if scaled == "mxfp4":
        (gate_up, gate_up_scales), (down, down_scales) = round_mxfp4(gate_up), round_mxfp4(down)
        return ExpertWeights(*(part.to(device) for part in (gate_up, down, gate_up_scales, down_scales)))
    if scaled == "int4":
        rounded = [
            Int4Weight.of(matrix.flatten(0, 1), matrix.shape[2] if matrix.shape[2] % 64 else 64)
            for matrix in (gate_up, down)
        ]
        (gate_up, gate_up_scales), (down, down_scales) = (
            [part.unflatten(0, (experts, -1)) for part in expert_codes(weight)] for weight in rounded
        )
        return ExpertWeights(*(part.to(device) for part in (gate_up, down, gate_up_scales, down_scales)))
    if scaled == "nvfp4":
        up, down = (stack_in_nvfp4(matrix.to(device)) for matrix in (gate_up, down))
        return ExpertWeights(
            *(up.weights, down.weights, up.scales, down.scales),
            gate_up_factors=up.factors,
            down_factors=down.factors,
        )
    codes = [(w * w.shape[2] ** 0.5 * 16).to(torch.float8_e4m3fn).to(device) for w in (gate_up, down)]
    shapes = [w.shape[:2] if scaled == "channel" else (w.shape[0], w.shape[1] // 128, w.shape[2] // 128) for w in codes]
    scales = [torch.logspace(-4, -2, 7)[torch.randint(7, shape)].to(device) for shape in shapes]
    return ExpertWeights(*codes, *scales)


def stack_in_nvfp4(matrices: torch.Tensor) -> Stack:
    """Round matrices [E, N, K], each by itself."""
    parts = [expert_stack(Nvfp4Weight.of(matrix), None) for matrix in matrices]
    return Stack(*(None if part[0] is None else torch.stack(part) for part in zip(*parts, strict=True)))


def exact_routes(x, norm, router, top_k, renormalise, bias=None, shared=False):
    """Return (ids, weights) in float64, ties to the lower id; a shared expert last."""
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    logits = wide @ router.double().T + (0.0 if bias is None else bias.double())
    chosen = logits[:, :-1] if shared else logits
    weights, ids = chosen.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if shared:
        weights = torch.cat((weights, logits[:, -1:].sigmoid()), -1)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], len(router) - 1)), -1)
    return ids, weights


def exact_experts(
    x, norm, router, weights, *, top_k, renormalise, activation="silu", residual=None, router_bias=None, shared=False
):
    """Return the layer's result in float64, with nothing rounded between the steps."""
    ids, shares = exact_routes(x, norm, router, top_k, renormalise, router_bias, shared)
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    gate_up, down = weights.widened(torch.float64)
    between = torch.einsum("th,tkih->tki", wide, gate_up[ids])
    if weights.gate_up_bias is not None:
        between = between + weights.gate_up_bias.double()[ids]
    gate, up = between.chunk(2, -1)
    act = {"silu": F.silu, "gelu_tanh": lambda value: F.gelu(value, approximate="tanh")}
    h = clamped_swish(gate, up) if activation == "clamped_swish" else act[activation](gate) * up
    of_each = torch.einsum("tki,tkhi->tkh", h, down[ids])
    if weights.down_bias is not None:
        of_each = of_each + weights.down_bias.double()[ids]
    result = torch.einsum("tk,tkh->th", shares, of_each)
    return result if residual is None else result + residual.double()
