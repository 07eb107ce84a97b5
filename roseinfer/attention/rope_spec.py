"""Rotary position embedding of a layer, as plain data that is known before any weight is read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Factor of queries by position (Llama 4): 1 + beta * ln(1 + floor(position / original_max_position))."""

    beta: float
    original_max_position: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021): pairs of numbers of a head are rotated by position * frequency.

    rotary_dim: count of leading numbers of a head that are rotated, None for all. interleaved: neighbours 2i and 2i + 1
    are a pair; otherwise i and i + rotary_dim / 2 are. magnitude: factor of the rotated numbers. query_scale: factor of
    whole queries.

    scaling: how theta^(-2i / rotary_dim) become the frequencies (`attention/rope.py` has the formulas):

    * "default": as they are;
    * "linear": divided by `factor`;
    * "llama3": those with long wavelengths, compared with `original_max_position`, are divided by `factor`;
    * "yarn": the same with another transition, between `beta_fast` and `beta_slow` rotations;
    * "longrope": divided by `divisors`, one for each;
    * "ntk_alpha": those of a larger theta, times factor^(rotary_dim / (rotary_dim - 2)) (Hunyuan);
    * "proportional": those of a head whose first `rotary_dim` numbers count, spread over the whole head: pair i is
      number i and i + head_dim / 2, and pairs from rotary_dim / 2 on are not rotated.
    """

    theta: float
    rotary_dim: int | None = None
    interleaved: bool = False
    magnitude: float = 1.0
    query_scale: QueryScale | None = None
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
