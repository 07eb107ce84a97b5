"""Helpers of `draw`'s kernels: a row's settings, weights of logits, and random numbers."""

import torch

from roseinfer.kernels.common.triton_support import tl, triton

# A seat of at most this temperature takes the likeliest token: one and a half times the smallest normal float32, below
# which logits cannot be divided by it.
MAX_GREEDY_TEMPERATURE = 1.5 * 2.0**-126
# Weights below 2^-44 count as 0; 2^18 weights of 1 still fit an int64.
FIXED_BITS = 44

_GREEDY_TEMPERATURE = tl.constexpr(MAX_GREEDY_TEMPERATURE)
_FIXED_ONE = tl.constexpr(2.0**FIXED_BITS)

# SplitMix64, see `roseinfer.runner.rng`.
_INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def row_settings(settings_ptr, integers_ptr, seat, best):
    """Return scale, top_p, min_p and top_k of a seat, and whether its token is drawn instead of the likeliest one."""
    settings_ptr += seat * 3
    temperature = tl.load(settings_ptr)
    is_random = (temperature > _GREEDY_TEMPERATURE) & (tl.abs(best) < float("inf"))
    scale = (1.4426950408889634 / tl.where(is_random, temperature, 1.0)).to(tl.float32)
    top_p = tl.load(settings_ptr + 1)
    min_p = tl.load(settings_ptr + 2).to(tl.float32)
    return scale, top_p, min_p, tl.load(integers_ptr + seat * 3 + 2), is_random


@triton.jit
def is_filtered(top_p, top_k, vocab_size, is_random):
    """Return whether a row is filtered, and whether by number first."""
    by_count = (top_k > 0) & (top_k < vocab_size)
    return is_random & (by_count | (top_p < 1.0)), by_count


@triton.jit
def weigh(x, best, scale, min_p):
    """Return the weights of logits x, 0 for tokens dropped by min-p."""
    weight = tl.exp2((x - best) * scale)
    return tl.where(weight < min_p, 0.0, weight)


@triton.jit
def fixed(weight):
    """Return a weight as a fixed-point number."""
    return (weight * _FIXED_ONE).to(tl.int64)


@triton.jit
def uniform(seed, index):
    """`roseinfer.runner.rng.uniforms` for kernels."""
    key = _mix(seed.to(tl.uint64) + _INCREMENT)
    bits = _mix(key + (index + 1).to(tl.uint64) * _INCREMENT)
    return (bits >> 12).to(tl.float64) * 2.0**-52


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MULTIPLIER_1
    z = (z ^ (z >> 27)) * _MULTIPLIER_2
    return z ^ (z >> 31)


def weigh_reference(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Return fixed-point weights [n, V] int64 of logits [n, V] by the settings [n, 3] of their rows."""
    temperature, min_p = settings[:, :1], settings[:, 2:].float()
    scale = (1.4426950408889634 / temperature).float()
    x = logits.float()
    weights = torch.exp2((x - x.amax(-1, keepdim=True)) * scale)
    return (weights.masked_fill(weights < min_p, 0.0) * 2.0**FIXED_BITS).long()
