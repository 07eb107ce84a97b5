"""Layers of experts for kernels, and their exact results in float64."""

from typing import Any

import torch
import torch.nn.functional as F

from roseinfer.kernels.experts.few_tokens import ExpertWeights
from roseinfer.kernels.linear.skinny import SkinnyNorm


def router_case(device: torch.device, tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs by name; some rows of x are large and off centre, so that a wrong norm shows."""
    x = torch.randn(tokens, hidden) * (1 + torch.arange(tokens))[:, None] + 0.5
    router = torch.randn(experts, hidden) * 2 * hidden**-0.5
    norm = SkinnyNorm((torch.randn(hidden) / 4 + 1).to(dtype).to(device), 1e-5)
    return {"x": x.to(dtype).to(device), "norm": norm, "router": router.to(dtype).to(device)}


def expert_weights(
    device: torch.device, experts: int, hidden: int, width: int, dtype: torch.dtype, scaled: str = "none"
) -> ExpertWeights:
    """Return weights with scales by "channel" or "block" that differ by up to a hundredfold."""
    gate_up = torch.randn(experts, 2 * width, hidden) * hidden**-0.5
    down = torch.randn(experts, hidden, width) * width**-0.5
    if scaled == "none":
        return ExpertWeights(gate_up.to(dtype).to(device), down.to(dtype).to(device))
    codes = [(w * w.shape[2] ** 0.5 * 16).to(torch.float8_e4m3fn).to(device) for w in (gate_up, down)]
    shapes = [w.shape[:2] if scaled == "channel" else (w.shape[0], w.shape[1] // 128, w.shape[2] // 128) for w in codes]
    scales = [torch.logspace(-4, -2, 7)[torch.randint(7, shape)].to(device) for shape in shapes]
    return ExpertWeights(*codes, *scales)


def exact_routes(x, norm, router, top_k, renormalise):
    """Return (ids, weights) in float64, ties to the lower id."""
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    weights, ids = (wide @ router.double().T).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return ids, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def exact_experts(x, norm, router, weights, *, top_k, renormalise, activation="silu", residual=None):
    """Return the layer's result in float64, with nothing rounded between the steps."""
    ids, shares = exact_routes(x, norm, router, top_k, renormalise)
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    gate_up, down = weights.widened(torch.float64)
    act = {"silu": F.silu, "gelu_tanh": lambda value: F.gelu(value, approximate="tanh")}[activation]
    gate, up = torch.einsum("th,tkih->tki", wide, gate_up[ids]).chunk(2, -1)
    result = torch.einsum("tk,tki,tkhi->th", shares, act(gate) * up, down[ids])
    return result if residual is None else result + residual.double()
