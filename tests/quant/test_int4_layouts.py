"""Layouts of weights in four bits: read exactly by the formula of their tools, or refused by name."""

from typing import Any

import numpy as np
import pytest
import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightPiece
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from roseinfer.quant.int4_stored import Int4Source, read_stack
from tests.helpers.int4_files import Drawn, Tensors, awq, draw, gptq, gptq_v2, pack_quantized
from tests.helpers.weights import Named

PACKERS = {"awq": awq, "gptq": gptq, "gptq_v2": gptq_v2, "pack-quantized": pack_quantized}
NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 40, 256


def named(tensors: Tensors, name: str = NAME) -> Tensors:
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in tensors.items()}


def source_of(layout: str, tensors: Tensors, size: int | None = 32, *, symmetric: bool = False) -> Int4Source:
    return Int4Source(Named(tensors), Int4Scheme(layout, Int4Groups(size, symmetric)))


def whole(rows: int = ROWS, columns: int = COLUMNS, name: str = NAME) -> WeightPiece:
    return WeightPiece(name, Share(0, rows, rows), Share(0, columns, columns))


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def check(source: Int4Source, drawn: Drawn, piece: WeightPiece | None = None) -> None:
    """Compare a piece, as four bits and as floats, with the part of the matrix that it is."""
    piece = piece or whole()
    rows = slice(piece.outs.start, piece.outs.start + piece.outs.width)
    columns = slice(piece.ins.start, piece.ins.start + piece.ins.width)
    expected = drawn.wide[rows, columns]
    assert torch.equal(source.read_int4(piece).widen(torch.float32), expected)
    found = torch.empty(expected.shape)
    source.read(f"{piece.name}.weight", found, shard=(piece.outs, piece.ins))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", PACKERS)
@pytest.mark.parametrize("size", [32, 64, 128, None])
@pytest.mark.parametrize("symmetric", [False, True])
def test_values_are_those_of_the_formula(layout: str, size: int | None, symmetric: bool) -> None:
    """Check all zeros that a layout stores: version 1 of GPTQ stores none of 0."""
    drawn = draw(ROWS, COLUMNS, size or COLUMNS, rng(), symmetric=symmetric)
    assert symmetric or {0, 15} <= set(drawn.zeros.flat)
    drawn.zeros[drawn.zeros == 0] = 1 if layout == "gptq" else 0
    source = source_of(layout, named(PACKERS[layout](drawn)), size, symmetric=symmetric and layout != "awq")
    check(source, drawn)
    weight = source.read_int4(whole()).weight
    assert weight.group == (size or COLUMNS) and weight.codes.shape == (ROWS, COLUMNS // 2)
    assert (weight.offsets is None) == (symmetric and layout != "awq")


@pytest.mark.parametrize("layout", PACKERS)
def test_parts_of_outputs_and_of_groups(layout: str) -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng())
    drawn.zeros[drawn.zeros == 0] = 3
    source = source_of(layout, named(PACKERS[layout](drawn)))
    for start, width in ((0, 8), (12, 20), (39, 1)):
        check(source, drawn, WeightPiece(NAME, Share(start, width, ROWS), Share(0, COLUMNS, COLUMNS)))
        check(source, drawn, WeightPiece(NAME, Share(start, width, ROWS), Share(96, 64, COLUMNS)))


def test_a_part_of_a_whole_row_keeps_the_rows_scale() -> None:
    drawn = draw(ROWS, COLUMNS, COLUMNS, rng())
    for layout in ("awq", "gptq_v2", "pack-quantized"):
        source = source_of(layout, named(PACKERS[layout](drawn)), None)
        piece = WeightPiece(NAME, Share(0, ROWS, ROWS), Share(104, 72, COLUMNS))
        check(source, drawn, piece)
        assert source.read_int4(piece).weight.group == 72


def test_versions_of_gptq_differ_in_their_zeros_alone() -> None:
    drawn = draw(ROWS, COLUMNS, 64, rng())
    drawn.zeros[drawn.zeros == 0] = 1
    first, second = named(gptq(drawn)), named(gptq_v2(drawn))
    assert [name for name in first if not torch.equal(first[name], second[name])] == [f"{NAME}.qzeros"]
    check(source_of("gptq", first, 64), drawn)
    check(source_of("gptq_v2", second, 64), drawn)


def test_scales_of_any_float_type() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        drawn = draw(ROWS, COLUMNS, 32, rng(), dtype=dtype)
        source = source_of("pack-quantized", named(pack_quantized(drawn)))
        check(source, drawn)
        assert source.read_int4(whole()).weight.scales.dtype is dtype
    drawn = draw(ROWS, COLUMNS, 32, rng(), dtype=torch.float32)
    found = source_of("pack-quantized", named(pack_quantized(drawn))).read_int4(whole()).widen(torch.float32)
    torch.testing.assert_close(found, drawn.wide, rtol=0, atol=1e-7)


def test_outputs_that_words_do_not_divide() -> None:
    drawn = draw(13, COLUMNS, 32, rng())
    tensors = named(pack_quantized(drawn))
    assert tensors[f"{NAME}.weight_zero_point"].shape == (2, 8)
    check(source_of("pack-quantized", tensors), drawn, whole(13))


@pytest.mark.parametrize("layout", ["gptq_v2", "pack-quantized"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_columns_in_groups_out_of_order(layout: str, symmetric: bool) -> None:
    drawn = draw(ROWS, COLUMNS, 64, rng(), symmetric=symmetric, disordered=True)
    source = source_of(layout, named(PACKERS[layout](drawn)), 64, symmetric=symmetric)
    check(source, drawn)
    part = source.read_int4(whole())
    assert part.inputs is not None and torch.equal(source.order_of(NAME), part.inputs)
    x = torch.randn(3, COLUMNS, dtype=torch.float64)
    product = x[:, part.inputs] @ part.weight.widen(torch.float64).T
    torch.testing.assert_close(product, x @ drawn.wide.double().T)


def test_groups_that_were_never_set_are_in_order() -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng(), symmetric=True)
    tensors = named(pack_quantized(drawn)) | {f"{NAME}.weight_g_idx": torch.full((COLUMNS,), -1, dtype=torch.int32)}
    source = source_of("pack-quantized", tensors, symmetric=True)
    check(source, drawn)
    assert source.read_int4(whole()).inputs is None


def test_names_and_shapes_are_those_of_floats() -> None:
    for layout, pack in PACKERS.items():
        tensors = named(pack(draw(ROWS, COLUMNS, 32, rng(), symmetric=True))) | {"norm.weight": torch.ones(4)}
        source = source_of(layout, tensors, symmetric=layout != "awq")
        assert f"{NAME}.weight" in source and "other.weight" not in source and "norm.weight" in source
        held = source.stored(f"{NAME}.weight")
        assert held is not None and held.shape == (ROWS, COLUMNS)
        source.skip(f"{NAME}.weight")
        assert source._inner.asked == {name for name in tensors if name.startswith(NAME)}
        into = torch.empty(4)
        source.read("norm.weight", into)
        assert into.tolist() == [1.0] * 4


def test_stacks_keep_each_parts_scales() -> None:
    names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"]
    drawn = [draw(rows, COLUMNS, 32, np.random.default_rng(rows)) for rows in (40, 16, 24)]
    tensors = {}
    for name, one in zip(names, drawn, strict=True):
        tensors |= named(awq(one), name)
    pieces = [whole(len(one.codes), name=name) for name, one in zip(names, drawn, strict=True)]
    stack = read_stack(source_of("awq", tensors), pieces)
    assert stack is not None
    assert torch.equal(stack.widen(torch.float32), torch.cat([one.wide for one in drawn]))
    source = source_of("awq", {name: t for name, t in tensors.items() if "k_proj" not in name})
    assert read_stack(source, pieces) is None, "a part is stored as floats"


# --- refusals -------------------------------------------------------------------------------------------------------
def refuse(source: Int4Source, message: str, piece: WeightPiece | None = None) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        source.read_int4(piece or whole())


def test_stacks_of_unlike_parts_are_refused() -> None:
    names = ("a.gate_proj", "a.up_proj")
    pieces = [whole(name=name) for name in names]

    def stack(first: Drawn, second: Drawn, **exceptions: Int4Groups) -> None:
        tensors = named(gptq_v2(first), names[0]) | named(gptq_v2(second), names[1])
        patterns = tuple((rf".*\.{name}", groups) for name, groups in exceptions.items())
        read_stack(Int4Source(Named(tensors), Int4Scheme("gptq_v2", Int4Groups(32, False), patterns)), pieces)

    plain = draw(ROWS, COLUMNS, 32, rng())
    both = "a.gate_proj, a.up_proj: one product of parts"
    with pytest.raises(UnsupportedModelError, match=f"{both} in unlike groups"):
        stack(plain, draw(ROWS, COLUMNS, 64, rng()), up_proj=Int4Groups(64, symmetric=False))
    with pytest.raises(UnsupportedModelError, match=f"{both} in unlike groups"):
        stack(plain, draw(ROWS, COLUMNS, 32, rng(), symmetric=True), up_proj=Int4Groups(32, symmetric=True))
    with pytest.raises(UnsupportedModelError, match=f"{both} with inputs in unlike orders"):
        stack(plain, draw(ROWS, COLUMNS, 32, rng(), disordered=True))
    stack(plain, plain)


@pytest.mark.parametrize("layout", PACKERS)
def test_a_scale_of_zero_is_refused_unless_its_weights_are_zero(layout: str) -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng())
    drawn.zeros[drawn.zeros == 0] = 2
    drawn.scales[3, 5] = 0
    tensors = named(PACKERS[layout](drawn))
    refuse(source_of(layout, tensors), f"tensor {NAME}.(weight_scale|scales) holds a scale of zero")
    drawn.codes[3, 160:192] = drawn.zeros[3, 5]
    check(source_of(layout, named(PACKERS[layout](drawn))), drawn)


def test_zeros_that_version_1_of_gptq_cannot_store_are_refused() -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng())
    assert (drawn.zeros == 0).any()
    refuse(source_of("gptq", named(gptq(drawn))), f"tensor {NAME}.qzeros holds a zero of -1 or 16")


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_zeros_of_a_symmetric_file_that_are_not_8_are_refused(layout: str) -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng(), symmetric=True)
    drawn.zeros[2, 2] = 9
    source = source_of(layout, named(PACKERS[layout](drawn)), symmetric=True)
    refuse(source, f"tensor {NAME}.qzeros holds zeros other than 8, but sym is true")


def test_uneven_groups_are_refused() -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng(), disordered=True)
    drawn.group_of[0] = (drawn.group_of[0] + 1) % 8
    refuse(source_of("gptq_v2", named(gptq_v2(drawn))), f"tensor {NAME}.g_idx does not put 32 inputs into each")


def test_ranks_cannot_share_columns_that_are_out_of_order() -> None:
    drawn = draw(ROWS, COLUMNS, 32, rng(), disordered=True)
    source = source_of("gptq_v2", named(gptq_v2(drawn)))
    half = WeightPiece(NAME, Share(0, ROWS, ROWS), Share(0, COLUMNS // 2, COLUMNS))
    refuse(source, f"{NAME}.g_idx: .*out of order cannot be split, as tensor_parallel_size asks for", half)
    check(source, drawn, WeightPiece(NAME, Share(8, 16, ROWS), Share(0, COLUMNS, COLUMNS)))


@pytest.mark.parametrize(
    ("size", "ins", "message"),
    [
        (128, Share(0, 64, COLUMNS), "cannot be cut at inputs 0 and 64, as tensor_parallel_size asks for"),
        (None, Share(4, 8, COLUMNS), "cannot be cut at inputs 4 and 12, as tensor_parallel_size asks for"),
        (128, Share(0, 192, 192), "192 inputs cannot be divided into groups of 128"),
        (None, Share(0, 100, 100), "cannot be cut at inputs 0 and 100$"),
    ],
)
def test_inputs_that_groups_do_not_divide_are_refused(size: int | None, ins: Share, message: str) -> None:
    source = source_of("awq", named(awq(draw(ROWS, COLUMNS, 128, rng()))), size)
    refuse(source, f"{NAME}: .*{message}", WeightPiece(NAME, Share(0, ROWS, ROWS), ins))


def test_a_shape_that_differs_from_the_config_is_refused() -> None:
    tensors: dict[str, Any] = named(pack_quantized(draw(ROWS, COLUMNS, 32, rng(), symmetric=True)))
    tensors[f"{NAME}.weight_shape"] = torch.tensor([ROWS, COLUMNS - 32])
    refuse(source_of("pack-quantized", tensors, symmetric=True), r"weight_shape holds \[40, 224\], .* says \[40, 256\]")
