"""Norm and rotation of a layer's queries and keys, between their projection and attention.

Rotary position embedding (Su et al., 2021) in the half-rotation form of Llama: dimensions i and i + D/2 of a head are
rotated by the angle position * frequency[i]. The angles of a step are the same in every layer. A CPU computes them once
a step; a GPU looks them up in a table (64 MiB at 131,072 positions).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.spec import AttentionSpec
from roseinfer.kernels.attention.heads import cos_sin_table
from roseinfer.quant.base import WeightSource, read_new


class Angles(NamedTuple):
    """cos and sin, [T, 1, D] float32, over both halves of a head; the first half of `sin` is negated."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate every head of x [T, heads, D] in float32, and return it in x's dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * angles.cos, swapped, angles.sin).to(x.dtype)


class Rotary:
    """Frequencies [D/2] of a model, in float32 as in the published code, so that large angles round alike.

    cos_sin: [positions, D] float32, the cosines of every position's angles, then their sines. It exists only on a GPU,
    for kernels that look angles up, and ends at position `longest`.
    """

    def __init__(self, frequencies: torch.Tensor, longest: int) -> None:
        self._frequencies = frequencies
        self._positions: torch.Tensor | None = None
        self._angles: Angles | None = None
        self.cos_sin: torch.Tensor | None = None
        if frequencies.is_cuda:
            self.cos_sin = cos_sin_table(frequencies, longest)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return the angles of positions [T] int64. The last result is cached: all layers of a step share it."""
        if positions is not self._positions or self._angles is None:
            angle = positions.to(torch.float32)[:, None, None] * self._frequencies
            cos, sin = angle.cos(), angle.sin()
            self._angles = Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
            self._positions = positions
        return self._angles


def default_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return theta^(-2i/D), [D/2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / theta**exponents


def linear_frequencies(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """Return frequencies for position interpolation (Chen et al., 2023): positions divided by `factor`."""
    return default_frequencies(head_dim, theta) / factor


def llama3_frequencies(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: float,
) -> torch.Tensor:
    """Return Llama 3.1's frequencies: long wavelengths are stretched by `factor`, short ones stay, others are blended.

    A wavelength is long above original_max_position / low_freq_factor tokens, and short below original_max_position /
    high_freq_factor. Source: `apply_scaling` in Meta's llama-models repository.
    """
    frequencies = default_frequencies(head_dim, theta)
    turns = original_max_position * frequencies / (2 * math.pi)  # full rotations within the original context
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


# --- norms, and norm with rotation -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head (Qwen3): one weight [D] for queries, one for keys.

    both: [heads + kv_heads, D], the two weights repeated for each head, so that one norm serves queries and keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    both: torch.Tensor
    eps: float

    @classmethod
    def load(cls, source: WeightSource, query_name: str, key_name: str, spec: AttentionSpec, eps: float) -> "HeadNorms":
        query = read_new(source, f"{query_name}.weight", spec.head_dim)
        key = read_new(source, f"{key_name}.weight", spec.head_dim)
        return cls(query, key, torch.cat((query.expand(spec.heads, -1), key.expand(spec.kv_heads, -1))), eps)


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Transformation of one layer's projections: its attention, and what precedes it for queries and keys.

    norms: None if the model has none. rotary: None for learned positions. kv_scales: the checkpoint's scales for K and
    V in FP8, or None.
    """

    spec: AttentionSpec
    norms: HeadNorms | None = None
    rotary: Rotary | None = None
    kv_scales: KVScales | None = None

    def split(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split packed projections into q [T, heads, D], k and v [T, kv_heads, D]; norm and rotate q and k."""
        heads, kv_heads, head_dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        turned = heads + kv_heads
        by_head = qkv.view(qkv.shape[0], turned + kv_heads, head_dim)
        if self.norms is None and self.rotary is None:
            q, k, v = by_head.split_with_sizes((heads, kv_heads, kv_heads), 1)
            return q, k, v
        qk, v = by_head[:, :turned], by_head[:, turned:]
        if self.norms is not None:
            qk = F.rms_norm(qk, (head_dim,), None, self.norms.eps) * self.norms.both
        if self.rotary is not None:
            qk = rotate(qk, self.rotary.angles(positions))
        return qk[:, :heads], qk[:, heads:], v
