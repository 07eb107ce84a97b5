import math

import pytest
import torch

from roseinfer.attention.rope import (
    Rotary,
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    rotate,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_turned_by_position_times_frequency(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    frequencies = default_frequencies(8, 100.0)
    positions = torch.tensor([0, 1, 5, 1000])
    x = torch.randn(4, 3, 8).to(dtype)
    turned = rotate(x, Rotary(frequencies, 2048).angles(positions))
    assert turned.dtype is dtype
    for i, frequency in enumerate(frequencies.tolist()):
        angle = positions[:, None].double() * frequency
        a, b = x[..., i].double(), x[..., i + 4].double()
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        for half, expected in (
            (i, a * angle.cos() - b * angle.sin()),
            (i + 4, b * angle.cos() + a * angle.sin()),
        ):
            torch.testing.assert_close(turned[..., half].double(), expected, rtol=0, atol=tolerance)


def test_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    rotary = Rotary(default_frequencies(16, 1e4), 2048)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    scores = [
        (rotate(q, rotary.angles(torch.tensor([p + 7]))) * rotate(k, rotary.angles(torch.tensor([p])))).sum()
        for p in (0, 10, 500)
    ]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=1e-3)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = Rotary(default_frequencies(8, 1e4), 2048), Rotary(linear_frequencies(8, 1e4, 4.0), 2048)
    torch.testing.assert_close(scaled.angles(torch.tensor([40, 80])).cos, plain.angles(torch.tensor([10, 20])).cos)


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths() -> None:
    plain = default_frequencies(128, 5e5)
    scaled = llama3_frequencies(
        128, 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any() and long.any() and not (short | long).all()
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~(short | long)
    assert (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()
