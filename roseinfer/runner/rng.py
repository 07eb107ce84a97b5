"""Random numbers as a pure function of (seed, output index): no state, the same on every device."""

import torch

# SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. Its increment
# is 2^64 / golden ratio; the multipliers are David Stafford's variant 13. The numbers are written as signed 64-bit
# integers, since torch wraps int64 products as C wraps unsigned ones.
_GOLDEN_RATIO_64_BITS = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def uniforms(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return one float64 in [0, 1) per row, a multiple of 2^-52. seeds, indices: [n] int64, any values.

    The seed is mixed before the index is added, so that neighbouring seeds give unrelated sequences. With 52 bits, u *
    total < total holds after rounding for every positive total.
    """
    key = _mix(seeds + _GOLDEN_RATIO_64_BITS)
    bits = _mix(key + (indices + 1) * _GOLDEN_RATIO_64_BITS)
    return _shift_right(bits, 12).to(torch.float64) * 2.0**-52


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift_right(z, 27)) * _MULTIPLIER_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically: int64 >> would extend the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
