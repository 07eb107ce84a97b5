"""Feed-forward layers of two products, or of a pair that passes its own form from the first to the second."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.norm import RMSNorm
from roseinfer.quant.base import Epilogue, Matmul, Norm, Pair, WeightFormat, WeightPiece, WeightSource
from roseinfer.quant.cpu_matmul import PlainMatmul
from roseinfer.quant.plain import PlainFormat
from tests.helpers.weights import Imagined, Named, build_for

HIDDEN, INNER = 8, 12


class Paired(PlainMatmul):
    """Product that records in `pairs` how often it was paired."""

    pairs = 0

    def paired(self, second: Matmul) -> Pair | None:
        return self._both(second) if isinstance(second, Paired) else None

    def _both(self, second: Matmul) -> Pair:
        def both(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            Paired.pairs += 1
            return second(self.after(norm, x), residual)

        return both


class PairedFormat(PlainFormat):
    """Format that pairs the layers whose names contain `marked`."""

    def __init__(self, marked: str) -> None:
        self._marked = marked

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        if self._marked not in pieces[0].name:
            return super().load(source, pieces, epilogue)
        weight = torch.empty(sum(piece.outs.width for piece in pieces), pieces[0].ins.width)
        start = 0
        for piece in pieces:
            source.read(f"{piece.name}.weight", weight[start : start + piece.outs.width], shard=(piece.outs, piece.ins))
            start += piece.outs.width
        return Paired(weight, None, epilogue)


def stored() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "n": (HIDDEN,),
        "m.gate_proj": (INNER, HIDDEN),
        "m.up_proj": (INNER, HIDDEN),
        "m.down_proj": (HIDDEN, INNER),
    }
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def expected(x: torch.Tensor) -> torch.Tensor:
    tensors = stored()
    normed = F.rms_norm(x, (HIDDEN,), tensors["n.weight"], 1e-5)
    between = F.silu(normed @ tensors["m.gate_proj.weight"].T) * (normed @ tensors["m.up_proj.weight"].T)
    return x + between @ tensors["m.down_proj.weight"].T


@pytest.mark.parametrize(("size", "adding"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("weight_format", "pairs"), [(PlainFormat(), 0), (PairedFormat("_proj"), 1), (PairedFormat("gate"), 0)]
)
def test_ranks_add_up_to_the_whole_with_one_residual(
    size: int, adding: bool, weight_format: WeightFormat, pairs: int
) -> None:
    x, parts = torch.randn(5, HIDDEN), []
    for rank in range(size):
        norm, layer = RMSNorm(HIDDEN, 1e-5), FeedForward(HIDDEN, INNER, "silu")
        source = Named(stored(), build_for(Imagined(rank, size, adding), weight_format))
        norm.load(source, "n")
        layer.load(source, ["m.gate_proj", "m.up_proj"], "m.down_proj")
        before = Paired.pairs
        parts.append(layer(norm, x, x))
        assert Paired.pairs == before + pairs
    torch.testing.assert_close(sum(parts), expected(x))
