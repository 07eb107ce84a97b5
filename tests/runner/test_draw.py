"""Draws compared with exact distributions: u runs over a grid, so every token's share is known to a grid step."""

import math

import pytest
import torch

from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.draw import DrawSettings, draw_filtered, draw_plain
from tests.helpers.cases import cases
from tests.runner.reference import distribution

GRID = 20_000


def settings(params: list[SequenceParams], candidates: tuple[int, ...] = (256,)) -> DrawSettings:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=torch.float64)

    return DrawSettings(
        column("temperature"),
        column("top_p"),
        column("min_p"),
        column("top_k").long(),
        any_min_p=any(p.min_p > 0 for p in params),
        any_whole_mass=any(p.top_p < 1 and not p.top_k for p in params),
        candidates=candidates,
    )


def draw(
    logits: torch.Tensor, params: list[SequenceParams], u: torch.Tensor, candidates: tuple[int, ...] = (256,)
) -> torch.Tensor:
    filtered = any(p.top_k or p.top_p < 1 for p in params)
    function = draw_filtered if filtered else draw_plain
    return function(logits.clone(), logits.amax(-1), settings(params, candidates), u)


def shares(logits: list[float], params: SequenceParams, candidates: tuple[int, ...] = (256,)) -> dict[int, float]:
    u = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    rows = torch.tensor(logits).expand(GRID, -1)
    tokens = draw(rows, [params] * GRID, u, candidates)
    counts = torch.bincount(tokens, minlength=len(logits)).tolist()
    return {token: count / GRID for token, count in enumerate(counts) if count}


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


LOGITS = [0.3, 2.0, -1.0, 1.9, -4.0, 0.9, 1.2, -0.5]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.1},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 4, "top_p": 0.8},
        {"top_k": 5, "min_p": 0.3},
        {"top_p": 0.9, "min_p": 0.25},
        {"top_k": 4, "top_p": 0.75, "min_p": 0.1, "temperature": 1.7},
    ],
)
@cases("candidates", [(3, 5)], exhaustive=[(5,), (256,)])
def test_shares_equal_the_exact_distribution(filters, candidates):
    params = SequenceParams(**filters)
    expected = distribution(LOGITS, params)
    drawn = shares(LOGITS, params, candidates)
    assert drawn.keys() <= expected.keys()
    for token, share in expected.items():
        assert abs(drawn.get(token, 0.0) - share) <= 1.5 / GRID


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}])
@cases("candidates", [(7,)], exhaustive=[(3, 5), (256,)])
def test_a_larger_number_draws_no_lower_id(filters, candidates):
    u = torch.linspace(0, 1 - 1e-9, 500, dtype=torch.float64)
    tokens = draw(torch.tensor(LOGITS).expand(500, -1), [SequenceParams(**filters)] * 500, u, candidates)
    assert bool((tokens.diff() >= 0).all()) and len(tokens.unique()) > 3


def test_the_token_that_crosses_p_is_kept():
    drawn = shares(log(0.5, 0.3, 0.15, 0.05), SequenceParams(top_p=0.7))
    assert drawn == pytest.approx({0: 0.625, 1: 0.375}, abs=1e-4)


def test_top_p_is_a_share_of_the_mass_after_top_k():
    # Of .4/.3/.2/.1, top-k 3 leaves .44/.33/.22, and the second token crosses .75 of that.
    assert shares(log(0.4, 0.3, 0.2, 0.1), SequenceParams(top_k=3, top_p=0.75)).keys() == {0, 1}
    assert shares(log(0.4, 0.3, 0.2, 0.1), SequenceParams(top_p=0.75)).keys() == {0, 1, 2}


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, -math.inf, 0.5, -math.inf]]).expand(4, -1)
    u = torch.tensor([0.0, 1 - 2**-52, 0.6, 0.7], dtype=torch.float64)
    for params in (SequenceParams(), SequenceParams(top_p=0.99), SequenceParams(top_k=5)):
        assert set(draw(logits, [params] * 4, u).tolist()) == {1, 4}


def test_equal_logits_rank_by_token_id():
    assert shares([1.0, 1.0, 1.0, 1.0, 0.0], SequenceParams(top_k=2)).keys() == {0, 1}
    flat = [0.0] * 40
    for candidates in ((3,), (7, 20), (256,)):
        assert shares(flat, SequenceParams(top_k=2), candidates).keys() == {0, 1}
        assert shares(flat, SequenceParams(top_p=0.24), candidates).keys() == set(range(10))


def test_candidates_change_nothing():
    """Draw peaked, flat and tied rows from few candidates and from a whole sort, in one batch and alone."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 3000, generator=generator) * torch.linspace(0.01, 8, 64)[:, None]
    logits[::3] = (logits[::3] * 2).round() / 2  # ties
    choices = [
        SequenceParams(top_p=0.9),
        SequenceParams(top_k=30),
        SequenceParams(top_k=15, top_p=0.5),
        SequenceParams(top_k=2000, top_p=0.3),
        SequenceParams(top_p=0.4, min_p=0.05, temperature=0.7),
        SequenceParams(top_p=1e-6),
    ]
    params = [choices[i % len(choices)] for i in range(64)]
    u = torch.rand(64, dtype=torch.float64, generator=generator)
    whole = draw(logits, params, u, candidates=())
    for candidates in ((16,), (31, 400), (1024,)):
        assert torch.equal(draw(logits, params, u, candidates), whole)
    alone = [draw(logits[i : i + 1], [params[i]], u[i : i + 1], (16, 64)).item() for i in range(64)]
    assert alone == whole.tolist()


@cases("vocab_size", [1, 257], exhaustive=[255, 256, 700, 1024])
def test_vocabularies_around_the_block_size(vocab_size):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)).mul(2).tolist()
    expected = distribution(logits, SequenceParams())
    drawn = shares(logits, SequenceParams())
    for token, share in expected.items():
        assert abs(drawn.get(token, 0.0) - share) <= 1.5 / GRID


def test_tiny_temperature_is_greedy():
    logits = torch.tensor([LOGITS])
    for params in (SequenceParams(temperature=1.2e-38), SequenceParams(temperature=1.2e-38, top_p=0.9)):
        assert draw(logits, [params], torch.tensor([0.999], dtype=torch.float64)).tolist() == [1]


def test_rows_without_a_distribution_still_give_an_index():
    """Check rows that become errors later: here they must not affect other rows."""
    logits = torch.tensor([[math.nan] * 4, [-math.inf] * 4, [math.inf, 0.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]])
    u = torch.full((4,), 0.5, dtype=torch.float64)
    for params in (SequenceParams(min_p=0.1), SequenceParams(top_p=0.5), SequenceParams(top_k=2)):
        for candidates in ((2,), (2, 3), (256,)):
            tokens = draw(logits, [params] * 4, u, candidates)
            assert all(0 <= t < 4 for t in tokens.tolist())
            assert tokens[3] == 1
