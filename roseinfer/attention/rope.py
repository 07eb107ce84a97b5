"""Frequencies and angles of rotary position embedding.

The angles of a step are the same in all layers that share a `Rotary`. A CPU computes them once a step; a GPU looks them
up in a table (64 MiB at 131,072 positions and heads of 128).
"""

import math
from typing import NamedTuple

import torch

from roseinfer.attention.rope_spec import QueryScale, RopeSpec
from roseinfer.kernels.attention.heads import RotatedPairs, cos_sin_table


class Angles(NamedTuple):
    """cos and sin, [T, 1, R] float32, of each rotated number. `sin` is negated for the first number of a pair.
    `queries`: factor of queries [T, 1, 1]; None if there is none.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    queries: torch.Tensor | None = None


class Rotary:
    """Rotation of one kind of layer: its frequencies [R / 2], in float32 as in published code, so that large angles
    round alike, and the pairs of numbers that they rotate.

    cos_sin: [positions, D] float32, a table for kernels that look angles up; it exists only on a GPU, and ends at
    position `longest`. queries_cos_sin: that of queries, the same table unless queries are scaled by position.
    """

    def __init__(
        self,
        frequencies: torch.Tensor,
        longest: int,
        head_dim: int | None = None,
        *,
        interleaved: bool = False,
        magnitude: float = 1.0,
        query_scale: QueryScale | None = None,
    ) -> None:
        """head_dim: numbers of a head, by default twice as many as `frequencies`."""
        self._frequencies = frequencies
        self._rotated = 2 * len(frequencies)
        self._head_dim = head_dim or self._rotated
        self.pairs = RotatedPairs(self._rotated, interleaved)
        self._magnitude = magnitude
        self._query_scale = query_scale
        whole = self._rotated == self._head_dim and not interleaved
        self._is_plain = whole and magnitude == 1.0 and query_scale is None
        self._positions: torch.Tensor | None = None
        self._angles: Angles | None = None
        self.cos_sin: torch.Tensor | None = None
        self.queries_cos_sin: torch.Tensor | None = None
        if frequencies.is_cuda:
            self.make_tables(longest)

    @classmethod
    def of(cls, rope: RopeSpec, head_dim: int, longest: int, device: torch.device) -> "Rotary":
        return cls(
            frequencies(rope, head_dim).to(device),
            longest,
            head_dim,
            interleaved=rope.interleaved,
            magnitude=rope.magnitude,
            query_scale=rope.query_scale,
        )

    def make_tables(self, longest: int) -> None:
        """Compute `cos_sin` and `queries_cos_sin` up to position `longest`."""
        self.cos_sin = cos_sin_table(self._frequencies, longest, self._head_dim, self._magnitude)
        self.queries_cos_sin = self.cos_sin
        if self._query_scale is not None:
            positions = torch.arange(longest, device=self._frequencies.device)
            self.queries_cos_sin = self.cos_sin * _query_factors(self._query_scale, positions)[:, None]

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return the angles of positions [T] int64. The last result is cached: all layers of a step share it."""
        if positions is not self._positions or self._angles is None:
            angle = positions.to(torch.float32)[:, None, None] * self._frequencies
            self._angles = self._arranged(angle.cos(), angle.sin(), positions)
            self._positions = positions
        return self._angles

    def rotate(self, qk: torch.Tensor, positions: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotate queries and keys qk [T, heads + kv_heads, D], queries first, in float32; return them in qk's dtype."""
        angles = self.angles(positions)
        return rotate(qk, angles) if self._is_plain else self._rotate_part(qk, angles, heads)

    def _arranged(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Angles:
        if self._is_plain:
            return Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        return self._arranged_in_pairs(cos * self._magnitude, sin * self._magnitude, positions)

    def _arranged_in_pairs(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Angles:
        halves = (cos, cos), (-sin, sin)
        if self.pairs.interleaved:
            cos, sin = (torch.stack(both, -1).flatten(-2) for both in halves)
        else:
            cos, sin = (torch.cat(both, -1) for both in halves)
        scale = self._query_scale
        return Angles(cos, sin, None if scale is None else _query_factors(scale, positions)[:, None, None])

    def _rotate_part(self, qk: torch.Tensor, angles: Angles, heads: int) -> torch.Tensor:
        rotated = rotate(qk[..., : self._rotated], angles, interleaved=self.pairs.interleaved)
        if self._rotated < qk.shape[-1]:
            rotated = torch.cat((rotated, qk[..., self._rotated :]), -1)
        if angles.queries is None:
            return rotated
        queries = (rotated[:, :heads] * angles.queries).to(qk.dtype)
        return torch.cat((queries, rotated[:, heads:]), 1)


def rotate(x: torch.Tensor, angles: Angles, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate every head of x [T, heads, R] in float32, and return it in x's dtype."""
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * angles.cos, swapped, angles.sin).to(x.dtype)


def _query_factors(scale: QueryScale, positions: torch.Tensor) -> torch.Tensor:
    """Return the factor of queries at positions [T], float32."""
    return 1.0 + scale.beta * torch.log1p(torch.floor(positions.to(torch.float32) / scale.original_max_position))


# --- frequencies -----------------------------------------------------------------------------------------------------
def frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the frequencies [R / 2] float32 of heads of `head_dim` numbers, of which R are rotated."""
    width = rope.rotary_dim or head_dim
    if rope.scaling == "linear":
        return linear_frequencies(width, rope.theta, rope.factor)
    if rope.scaling == "llama3":
        return llama3_frequencies(
            width,
            rope.theta,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position=rope.original_max_position,
        )
    if rope.scaling == "yarn":
        return _yarn_frequencies(width, rope)
    if rope.scaling == "longrope":
        return default_frequencies(width, rope.theta) / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.scaling == "ntk_alpha":
        return default_frequencies(width, rope.theta * rope.factor ** (width / (width - 2)))
    if rope.scaling == "proportional":
        rotated = default_frequencies(head_dim, rope.theta)[: width // 2] / rope.factor
        return torch.cat((rotated, torch.zeros(head_dim // 2 - width // 2)))
    return default_frequencies(width, rope.theta)


def default_frequencies(width: int, theta: float) -> torch.Tensor:
    """Return theta^(-2i / width), [width / 2] float32."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    return 1.0 / theta**exponents


def linear_frequencies(width: int, theta: float, factor: float) -> torch.Tensor:
    """Return frequencies for position interpolation (Chen et al., 2023): positions divided by `factor`."""
    return default_frequencies(width, theta) / factor


def llama3_frequencies(
    width: int,
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
    found = default_frequencies(width, theta)
    turns = original_max_position * found / (2 * math.pi)  # full rotations within the original context
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * found / factor + kept * found


def _yarn_frequencies(width: int, rope: RopeSpec) -> torch.Tensor:
    """Return YaRN's frequencies (Peng et al., 2023, "NTK-by-parts"): those that rotate less than `beta_slow` times
    within the original context are divided by `factor`, those that rotate more than `beta_fast` times stay, and the
    ones between are blended by their index.
    """
    found = default_frequencies(width, rope.theta)
    low, high = (
        width * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if high == low else 0.0
    divided = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return found / rope.factor * divided + found * (1.0 - divided)
