"""Weights in NVFP4 that a GPU keeps: what is read of checkpoints, ranks' parts of them, and drawn weights."""

import pytest
import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.parallel.group import Share
from roseinfer.quant.base import FLOATS, NO_EPILOGUE, WeightPiece
from roseinfer.quant.nvfp4_format import Nvfp4Format
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.nvfp4_stored import Nvfp4Source
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from roseinfer.quant.plain import PlainFormat
from roseinfer.quant.select import choose_format
from tests.helpers.nvfp4_files import TOOLS, draw, pack
from tests.helpers.weights import BUILD, Named

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCHEME = Nvfp4Scheme("modelopt", ignored=("b",))
ROWS, COLUMNS = {"q": 32, "k": 16}, 64


def piece(name: str, outs: Share, ins: Share) -> WeightPiece:
    return WeightPiece(name, outs, ins)


def whole(width: int) -> Share:
    return Share(0, width, width)


class Kept:
    """Product that only keeps its weight."""

    def __init__(self) -> None:
        self.weights: list[Nvfp4Weight] = []

    def __call__(self, weight, bias, epilogue, inputs):
        self.weights.append(weight)


def loaded(source, pieces, *, rounds=False) -> list[Nvfp4Weight]:
    kept = Kept()
    Nvfp4Format(SCHEME, kept, rounds=rounds).load(source, pieces, NO_EPILOGUE)
    return kept.weights


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("part", ["all", "outputs", "inputs"])
def test_stacked_matrices_keep_their_own_scales(tool: str, part: str) -> None:
    """Read q and k as a whole, and a rank's half of their outputs or inputs."""
    tensors, wide = {}, []
    for seed, (name, rows) in enumerate(ROWS.items()):
        packed, matrix = pack(*draw(rows, COLUMNS, seed), tool)
        tensors |= {f"{name}.{end}": tensor for end, tensor in packed.items()}
        wide.append(matrix[rows // 2 :] if part == "outputs" else matrix)
    ins = Share(COLUMNS // 2, COLUMNS // 2, COLUMNS) if part == "inputs" else whole(COLUMNS)
    outs = [Share(rows // 2, rows // 2, rows) if part == "outputs" else whole(rows) for rows in ROWS.values()]
    source = Named(tensors, BUILD)
    pieces = [piece(name, own, ins) for name, own in zip(ROWS, outs, strict=True)]
    (weight,) = loaded(Nvfp4Source(source, Nvfp4Scheme(tool)), pieces)
    expected = torch.cat(wide)[:, ins.start : ins.start + ins.width]
    torch.testing.assert_close(weight.widen(torch.float32), expected, rtol=1e-6, atol=0)
    assert source.asked == set(tensors)


def test_layers_that_are_not_all_in_four_bits_are_widened() -> None:
    packed, wide = pack(*draw(32, COLUMNS), "modelopt")
    tensors = {f"q.{end}": tensor for end, tensor in packed.items()} | {"k.weight": torch.randn(16, COLUMNS)}
    kept, source = Kept(), Nvfp4Source(Named(tensors, BUILD), SCHEME)
    pieces = [piece("q", whole(32), whole(COLUMNS)), piece("k", whole(16), whole(COLUMNS))]
    found = Nvfp4Format(SCHEME, kept)
    matmul = found.load(source, pieces, NO_EPILOGUE)
    assert not kept.weights and [found.form(source, name) for name in "qk"] == ["nvfp4", FLOATS]
    torch.testing.assert_close(matmul(torch.eye(COLUMNS)).T, torch.cat((wide, tensors["k.weight"])))


def test_drawn_weights_are_rounded_as_the_scheme_says() -> None:
    weight = torch.randn(32, COLUMNS) * torch.logspace(-3, 0, 32)[:, None]
    weight[3] = 0
    (rounded,) = loaded(Named({"a.weight": weight}, BUILD), [piece("a", whole(32), whole(COLUMNS))], rounds=True)
    wide = rounded.widen(torch.float32)
    assert torch.equal(wide[3], weight[3])
    error = (wide - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-9)
    assert 0.02 < error.max() < 0.15
    again = Nvfp4Weight.of(wide).widen(torch.float32)
    torch.testing.assert_close(again, wide, rtol=1e-6, atol=0)
    for name, columns in (("b", COLUMNS), ("a", 24)):
        source = Named({f"{name}.weight": torch.randn(8, columns)}, BUILD)
        assert not loaded(source, [piece(name, whole(8), whole(columns))], rounds=True)
    assert not loaded(Named({"a.weight": weight}, BUILD), [piece("a", whole(32), whole(COLUMNS))])


@pytest.mark.parametrize("tool", TOOLS)
def test_numbers_beyond_float16_are_refused(tool: str) -> None:
    codes, scales, _ = draw(8, COLUMNS)
    packed, _ = pack(codes, scales, 30.0, tool)
    source = Nvfp4Source(Named({f"a.{end}": tensor for end, tensor in packed.items()}, BUILD), Nvfp4Scheme(tool))
    with pytest.raises(
        UnsupportedModelError, match=r"tensor a\.weight_.*: a GPU supports weights within the range of float16"
    ):
        loaded(source, [piece("a", whole(8), whole(COLUMNS))])


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.quant.select.has_triton", lambda device: device.type == "cuda")
    assert choose_format(None, SCHEME, GPU, torch.bfloat16).stored_as == "nvfp4"
    assert choose_format(None, SCHEME, GPU, torch.float32).stored_as == "nvfp4, widened"
    assert choose_format("floats", SCHEME, GPU, torch.float16).stored_as == "nvfp4, widened"
    assert choose_format("int4", SCHEME, GPU, torch.float16).stored_as == "int4 in groups of 128"
    monkeypatch.setattr("roseinfer.quant.select.unsupported_reason", lambda: "it is another CPU")
    assert isinstance(choose_format(None, SCHEME, CPU, torch.bfloat16), PlainFormat)
