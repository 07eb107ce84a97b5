"""Large and small projections of one input: in one product and in two, whole and of ranks."""

import pytest
import torch

from roseinfer.layers import joint_linear
from roseinfer.layers.joint_linear import JointLinear
from roseinfer.layers.linear import StackedOutput
from roseinfer.layers.norm import RMSNorm
from roseinfer.parallel.group import RankGroup, SingleRank
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from tests.helpers.weights import Imagined, Named, build_for

LARGE, SMALL = [StackedOutput(8, 4), StackedOutput(16, 8)], [StackedOutput(4, 2), StackedOutput(4, 2)]
TENSORS = {f"{name}.weight": torch.randn(width, 32) for name, width in (("q", 8), ("z", 16), ("b", 4), ("a", 4))}
X = torch.randn(3, 32)


def run(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
    source = Named(TENSORS | {"norm.weight": torch.linspace(0.5, 1.5, 32)}, build_for(group))
    layer, norm = JointLinear(32, LARGE, SMALL), RMSNorm(32, 1e-6)
    norm.load(source, "norm")
    layer.load(source, ["q", "z"], ["b", "a"])
    assert source.asked == source.tensors.keys()
    return layer(norm, X)


@pytest.mark.parametrize("group", [SingleRank(), Imagined(0, 2), Imagined(1, 2)], ids=["whole", "first", "second"])
def test_one_product_gives_what_two_do(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = run(group)
    monkeypatch.setattr(joint_linear, "has_triton", lambda device: True)
    for found, expected in zip(run(group), apart, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


def test_small_matrices_are_not_rounded_with_the_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_linear, "has_triton", lambda device: True)
    tensors = {"q.weight": torch.randn(128, 128), "a.weight": torch.randn(4, 128)}
    rounding = Fp8Format(Fp8Scheme("block"), rounds=True, widens=True)
    layer, x = JointLinear(128, [StackedOutput(128)], [StackedOutput(4)]), torch.randn(2, 128)
    layer.load(Named(tensors, build_for(SingleRank(), rounding)), ["q"], ["a"])
    large, small = layer(None, x)
    torch.testing.assert_close(small, x @ tensors["a.weight"].T)
    assert 1e-3 < (large - x @ tensors["q.weight"].T).norm() / large.norm() < 0.1
