"""What happens to a layer's queries and keys between their projection and attention: norm and rotation.

Rotary position embedding (Su et al., 2021) in the half-rotation form of Llama: dimensions i and i + D/2 of a head are
turned by the angle position * frequency[i]. The angles of a step are the same in every layer, so they are worked out
once a step on a CPU; a GPU looks them up in a table (64 MiB at 131,072 positions).
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
    """Turn every head of x [T, heads, D]; computed in float32, returned in x's dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * angles.cos, swapped, angles.sin).to(x.dtype)


class Rotary:
    """The frequencies [D/2] of a model, float32 as in the published code, so that large angles round alike.

    `cos_sin` [positions, D] float32: cos of the angles of every position, then their sin, for kernels that look them
    up; there on a GPU only, up to position `longest`.
    """

    def __init__(self, frequencies: torch.Tensor, longest: int) -> None:
        self._frequencies = frequencies
        self._positions: torch.Tensor | None = None
        self._angles: Angles | None = None
        self.cos_sin: torch.Tensor | None = None
        if frequencies.is_cuda:
            self.cos_sin = cos_sin_table(frequencies, longest)

    def angles(self, positions: torch.Tensor) -> Angles:
        """positions: [T] int64. The last answer is kept: all layers of a step ask for the same."""
        if positions is not self._positions or self._angles is None:
            angle = positions.to(torch.float32)[:, None, None] * self._frequencies
            cos, sin = angle.cos(), angle.sin()
            self._angles = Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
            self._positions = positions
        return self._angles


def default_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """theta^(-2i/D), [D/2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / theta**exponents


def linear_frequencies(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """Position interpolation (Chen et al., 2023): positions divided by `factor`."""
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
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are blended.

    A wavelength is long above original_max_position / low_freq_factor tokens and short below
    original_max_position / high_freq_factor. Source: `apply_scaling` in Meta's llama-models repository.
    """
    frequencies = default_frequencies(head_dim, theta)
    turns = original_max_position * frequencies / (2 * math.pi)  # full turns within the original context
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / factor + kept * frequencies


# --- norms, and both of them ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head (Qwen3): one weight [D] for queries, one for keys.

    `both`: [heads + kv_heads, D], the two repeated per head, so that queries and keys are normed in one go.
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
    """What one layer does with its projections: what its attention computes, and what queries and keys undergo before.

    norms: None where the model has none. rotary: None for learned positions. kv_scales: the checkpoint's for K and V in
    FP8, None without.
    """

    spec: AttentionSpec
    norms: HeadNorms | None = None
    rotary: Rotary | None = None
    kv_scales: KVScales | None = None

    def split(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D] of packed projections; q and k normed and turned."""
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
