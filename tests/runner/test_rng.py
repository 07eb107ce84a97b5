import torch

from roseinfer.runner.rng import uniforms
from tests.runner import reference


def test_equals_splitmix64_in_plain_integers():
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63), 123456789]
    indices = [0, 1, 5, 1000, 2**40, 3, 7]
    drawn = uniforms(torch.tensor(seeds), torch.tensor(indices))
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [reference.uniform(s, i) for s, i in zip(seeds, indices, strict=True)]


def test_uniform_over_indices_and_over_seeds():
    n, bins = 20_000, 20
    for seeds, indices in ((torch.full((n,), 7), torch.arange(n)), (torch.arange(n), torch.full((n,), 3))):
        drawn = uniforms(seeds, indices)
        assert drawn.min() >= 0
        assert drawn.max() < 1
        counts = torch.histc(drawn, bins, 0, 1)
        chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum()
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_neighbouring_seeds_are_unrelated():
    index = torch.arange(5000)
    a, b = uniforms(torch.full((5000,), 1), index), uniforms(torch.full((5000,), 2), index)
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.05
    assert not set(a.tolist()) & set(b.tolist())
