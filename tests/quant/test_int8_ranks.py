"""Layers in four bits that become int8 on a CPU, divided between two ranks: each rounds its own part."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from roseinfer.layers.linear import Linear, Split
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from roseinfer.quant.int8_format import Int8Format
from roseinfer.quant.int8_product import unsupported_reason
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.scheme import QuantScheme
from roseinfer.quant.select import choose_format, widening_source
from tests.helpers.int4_files import MAKERS, Tensors, quantise_int4
from tests.helpers.nvfp4_files import draw, pack
from tests.helpers.weights import Imagined, Named, build_for

pytestmark = pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"int8 is not supported: {unsupported_reason()}"
)

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
SHAPES = {UP: (256, 128), DOWN: (128, 256)}
MAX_ERROR_SHARE = 0.08  # of the largest output


def in_awq() -> tuple[QuantScheme, Tensors, Tensors]:
    """Return a scheme, tensors of both layers, and their matrices in floats."""
    maker = MAKERS[0]
    floats = {f"{name}.weight": torch.zeros(shape) for name, shape in SHAPES.items()}
    return Int4Scheme("awq", Int4Groups(maker.group, symmetric=False)), *quantise_int4(floats, maker)


def in_nvfp4() -> tuple[QuantScheme, Tensors, Tensors]:
    narrow: Tensors = {}
    wide: Tensors = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        tensors, wide[f"{name}.weight"] = pack(*draw(*shape, number), "modelopt")
        narrow |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    return Nvfp4Scheme("modelopt"), narrow, wide


def parts(tensors: Tensors, scheme: QuantScheme | None, rank: int, size: int) -> tuple[Linear, Linear]:
    """Return a rank's part of both layers in int8: some outputs of the first, for some inputs of the second."""
    chosen = choose_format(None if scheme else "int8", scheme, torch.device("cpu"), torch.float32)
    assert isinstance(chosen, Int8Format)
    source = widening_source(Named(tensors, build_for(Imagined(rank, size), chosen)), scheme)
    up, down = Linear(128, 256, split=Split.OUTPUTS), Linear(256, 128, split=Split.INPUTS)
    up.load(source, UP)
    down.load(source, DOWN)
    return up, down


@pytest.mark.parametrize("make", [in_awq, in_nvfp4])
def test_ranks_round_their_own_parts(make: Any) -> None:
    scheme, narrow, wide = make()
    torch.manual_seed(0)
    x, h = torch.randn(3, 128), torch.randn(3, 256)
    whole_up, whole_down = parts(narrow, scheme, 0, 1)
    columns, total = [], torch.zeros(3, 128)
    for rank in range(2):
        own = slice(128 * rank, 128 * rank + 128)
        up, down = parts(narrow, scheme, rank, 2)
        up_of_floats, down_of_floats = parts(wide, None, rank, 2)
        assert torch.equal(up(x), up_of_floats(x)) and torch.equal(down(h[:, own]), down_of_floats(h[:, own]))
        columns.append(up(x))
        total += down(h[:, own])
    assert torch.equal(torch.cat(columns, 1), whole_up(x)), "the scales of outputs do not depend on ranks"
    expected = F.linear(h, wide[f"{DOWN}.weight"])
    assert (total - expected).abs().max() < MAX_ERROR_SHARE * expected.abs().max()
    assert not torch.equal(total, whole_down(h)), "a rank rounds a row of its own inputs"
