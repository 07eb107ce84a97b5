"""Inputs of `skinny_linear`, its exact results in float64, and configs."""

import torch
import torch.nn.functional as F

from roseinfer.kernels.linear.skinny import SkinnyNorm
from roseinfer.kernels.linear.skinny_configs import SkinnyConfig

CONFIGS = {
    "tensor cores": SkinnyConfig(block_n=8, block_k=64, dot=True, warps=2, stages=2, preload=True),
    "tensor cores, no preload": SkinnyConfig(block_n=16, block_k=64, dot=True, warps=4, stages=3, preload=False),
    "elementwise": SkinnyConfig(block_n=4, block_k=64, dot=False, warps=2, stages=1, preload=True),
    "elementwise, no preload": SkinnyConfig(block_n=8, block_k=32, dot=False, warps=1, stages=2, preload=False),
}
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-6}
KINDS = ["float16", "bfloat16"]


def dtype_of(kind, config):
    """Return the dtype to test: float32 replaces bfloat16 in products of the interpreter, which has none."""
    if kind == "bfloat16" and getattr(config, "dot", False) and not torch.cuda.is_available():
        return torch.float32
    return getattr(torch, kind)


def case(device, rows, in_features, out_features, dtype, *, norm=None, gated=False):
    """Return random inputs by name. Some rows of x are large and off centre, so that a wrong norm shows."""

    def random(*shape, scale=1.0):
        return (torch.randn(shape, dtype=torch.float32) * scale).to(dtype).to(device)

    weight_rows = 2 * out_features if gated else out_features
    x = random(rows, in_features) * (1 + torch.arange(rows, device=device, dtype=dtype))[:, None] + 0.5
    inputs = {"x": x, "weight": random(weight_rows, in_features, scale=in_features**-0.5)}
    if norm is not None:
        bias = random(in_features) if norm == "layer" else None
        inputs["norm"] = SkinnyNorm(random(in_features) + 1, 1e-5, bias)
    return inputs, random


def spread(scales, shape):
    """Return scales by row or by block of 128 x 128, for each element of a weight of `shape`."""
    if scales.ndim == 1:
        return scales[:, None].expand(shape)
    return scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def exact(x, weight, *, scales=None, bias=None, residual=None, norm=None, activation=None, gated=False):
    """Return the result in float64, with nothing rounded between the steps."""
    wide = exact_norm(x, norm)
    matrix = weight.double()
    if scales is not None:
        matrix = matrix * spread(scales, weight.shape).double()
    y = wide @ matrix.T
    if bias is not None:
        y = y + bias.double()
    gate, up = y.chunk(2, -1) if gated else (y, 1.0)
    act = {
        None: lambda value: value,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda value: F.gelu(value, approximate="tanh"),
    }[activation]
    y = act(gate) * up
    return y if residual is None else y + residual.double()


def exact_norm(x, norm):
    """Return x after the norm, or as it is without one, in float64."""
    wide = x.double()
    if norm is None:
        return wide
    if norm.bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    return wide if norm.bias is None else wide + norm.bias.double()


def assert_close(out, expected):
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert out.shape == expected.shape
    assert (error < TOLERANCE[out.dtype]).all(), error  # NaN fails too
