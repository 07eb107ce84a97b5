"""`CudaExperts` against the formula in float64, few tokens and many, in 16 bits and in FP8.

On a CPU its kernels run under Triton's interpreter, which has no products of bfloat16.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.kernels.common.mxfp4_codes import round_mxfp4, widen_mxfp4
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.layers.norm import RMSNorm
from roseinfer.parallel.group import RankGroup, Share, SingleRank, share_of
from roseinfer.quant import cuda_experts, fp8_format, int4_format, mxfp4_format, nvfp4_format, plain
from roseinfer.quant.base import Build, ExpertNames, Experts, ExpertShape, WeightPiece
from roseinfer.quant.expert_names import SharedExpertNames, StackedExpertNames
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.int4_format import CudaProducts, Int4Format
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.mxfp4_format import Mxfp4Format
from roseinfer.quant.nvfp4_format import Nvfp4Format
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.nvfp4_stored import Nvfp4Source
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from roseinfer.quant.stacked_experts import apart
from tests.helpers.cases import each_value
from tests.helpers.interpreter import hurry, round_codes
from tests.helpers.mxfp4_files import packed
from tests.helpers.nvfp4_files import TOOLS, pack
from tests.helpers.nvfp4_files import draw as draw_nvfp4
from tests.helpers.weights import BUILD, Imagined, Named
from tests.quant.test_experts import EPS, draw, expected, in_blocks

SHAPE = ExpertShape(count=4, top_k=2, hidden=256, width=256, renormalise=True, activation="silu")
NAMES = ExpertNames(router="moe.gate", gate="moe.experts.{}.w1", up="moe.experts.{}.w3", down="moe.experts.{}.w2")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAKE = replace(BUILD, dtype=torch.float16, device=DEVICE)
FEW, MANY = 1, 40

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow"),  # the interpreter's exponentials
]


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the tensor memory accelerator needs compute capability 9.0")
    hurry()
    round_codes()
    for module in (plain, fp8_format, int4_format, mxfp4_format, nvfp4_format):
        monkeypatch.setattr(module, "has_triton", lambda device: True)


def load(tensors: dict[str, torch.Tensor], shape: ExpertShape = SHAPE, build: Build = MAKE) -> Experts:
    share = share_of(build.group, shape.width)
    return build.weight_format.experts(Named(tensors, build), shape, share, NAMES)


def norm_of(tensors: dict[str, torch.Tensor], shape: ExpertShape = SHAPE) -> RMSNorm:
    norm = RMSNorm(shape.hidden, EPS)
    norm.load(Named(tensors, MAKE), "norm")
    return norm


def inputs(rows: int, hidden: int = SHAPE.hidden) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, hidden, generator=generator).to(MAKE.dtype).to(DEVICE)


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.half() if tensor.dtype is torch.float32 else tensor for name, tensor in tensors.items()}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return Fp8Weight.nearest(weight).widen(torch.float32)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double().cpu() - wanted).norm() / wanted.norm()).item()


@each_value(rows=[FEW, MANY], renormalise=[True, False])
def test_experts_in_16_bits(rows: int, renormalise: bool) -> None:
    shape = replace(SHAPE, renormalise=renormalise, hidden=72, width=40)
    tensors, x = halved(draw(shape)), inputs(rows, 72)
    wanted = expected(x.cpu(), tensors, shape)
    experts, norm = load(tensors, shape), norm_of(tensors, shape)
    before = x.clone()
    assert error(experts(norm, x, None), wanted) < 3e-3
    assert torch.equal(x, before), "without a residual nothing is overwritten"
    assert error(experts(norm, x, x) - before, wanted) < 5e-3


@each_value(layout=["block", "channel"], rows=[FEW, MANY])
def test_experts_in_fp8(layout: str, rows: int) -> None:
    """The inputs of many tokens are rounded, too."""
    tensors, x = halved(draw(SHAPE)), inputs(rows)
    if layout == "block":
        tensors, wide = in_blocks(tensors)
        kept = Fp8Format(Fp8Scheme("block"), rounds=False, widens=False)
    else:
        kept = Fp8Format(None, rounds=True, widens=False)
        wide = tensors | {name: rounded(tensor) for name, tensor in tensors.items() if ".experts." in name}
    experts = load(tensors, build=replace(MAKE, weight_format=kept))
    most = 3e-3 if rows == FEW else 5e-2
    assert error(experts(norm_of(tensors), x, None), expected(x.cpu(), wide, SHAPE)) < most


OF_SHARED = {"gate": "w1", "up": "w3", "down": "w2", "factor": "gate"}
SHARED = replace(NAMES, shared=SharedExpertNames(**{what: f"moe.shared.{name}" for what, name in OF_SHARED.items()}))
WITH_SHARED = replace(SHAPE, shared=True)


def with_shared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors with a shared expert, which is the first expert of another layer, and its gate."""
    other = draw(replace(SHAPE, count=1), seed=1)
    shared = {f"moe.shared.{name}.weight": other[f"moe.experts.0.{name}.weight"] for name in ("w1", "w3", "w2")}
    return tensors | shared | {"moe.shared.gate.weight": other["moe.gate.weight"]}


def expected_with_shared(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    h = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * wide["norm.weight"]
    gate, up, down, factor = (wide[f"moe.shared.{name}.weight"] for name in ("w1", "w3", "w2", "gate"))
    shared = (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return expected(x, tensors, SHAPE) + (h @ factor.T).sigmoid() * shared


def load_with_shared(tensors: dict[str, torch.Tensor], build: Build) -> Experts:
    source, share = Named(tensors, build), share_of(build.group, SHAPE.width)
    experts = build.weight_format.experts(source, WITH_SHARED, share, SHARED)
    assert source.asked >= {name for name in tensors if name.startswith("moe.") and not name.endswith("scale_inv")}
    return experts


@each_value(kind=["16 bits", "block", "channel"], rows=[FEW, MANY])
def test_a_shared_expert_is_one_more_of_the_stack(kind: str, rows: int) -> None:
    tensors, x = halved(with_shared(draw(SHAPE))), inputs(rows)
    wide, build = tensors, MAKE
    if kind == "block":
        tensors, wide = in_blocks(tensors)
        build = replace(MAKE, weight_format=Fp8Format(Fp8Scheme("block"), rounds=False, widens=False))
    elif kind == "channel":
        build = replace(MAKE, weight_format=Fp8Format(None, rounds=True, widens=False))
        matrices = [name for name in tensors if ".experts." in name or name.startswith("moe.shared.w")]
        wide = tensors | {name: rounded(tensors[name]) for name in matrices}
    most = 3e-3 if rows == FEW or kind == "16 bits" else 5e-2
    before = x.clone()
    experts, norm = load_with_shared(tensors, build), norm_of(tensors)
    wanted = expected_with_shared(x.cpu(), wide)
    assert error(experts(norm, x, None), wanted) < most
    assert error(experts(norm, x, x) - before, wanted) < most + 2e-3


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_ranks_add_up_to_the_whole_with_a_shared_expert(rows: int) -> None:
    tensors, x = halved(with_shared(draw(SHAPE))), inputs(rows)
    ranks = [load_with_shared(tensors, replace(MAKE, group=Imagined(rank, 2))) for rank in range(2)]
    total = sum(experts(norm_of(tensors), x, None) for experts in ranks)
    assert error(total, expected_with_shared(x.cpu(), tensors)) < 5e-3


class InFourBits(Named):
    """Source that rounds experts to four bits when they are read; down has groups of another size or order."""

    down_group, order = 32, None

    def keeps_int4(self, pieces: Sequence[WeightPiece]) -> bool:
        return all(".experts." in piece.name for piece in pieces)

    def read_int4(self, piece: WeightPiece) -> Int4Part:
        part = torch.empty(piece.outs.width, piece.ins.width, dtype=torch.float32)
        self.read(f"{piece.name}.weight", part, shard=(piece.outs, piece.ins))
        is_down = piece.name.endswith("w2")
        return Int4Part(Int4Weight.of(part.to(DEVICE), self.down_group if is_down else 64), self.order)

    def order_of(self, name: str) -> torch.Tensor | None:
        return self.order


INT4 = Int4Scheme("awq", Int4Groups(32, symmetric=False))


def in_int4(tensors: dict[str, torch.Tensor], groups: Callable[[str], int]) -> dict[str, torch.Tensor]:
    """Return the same tensors with experts rounded to four bits."""
    return tensors | {
        name: Int4Weight.of(tensor, groups(name)).widen(torch.float32)
        for name, tensor in tensors.items()
        if ".experts." in name
    }


@each_value(kind=["stored", "drawn", "in another order"], rows=[FEW, MANY])
def test_experts_in_int4(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, width=96)
    tensors, x = halved(draw(shape)), inputs(rows)
    build = replace(MAKE, weight_format=Int4Format(INT4, CudaProducts(), rounds=kind == "drawn"))
    source: Named = InFourBits(tensors, build) if kind != "drawn" else Named(tensors, build)
    wide = in_int4(tensors, lambda name: 64 if kind == "stored" and "w2" not in name else 32)
    if kind == "in another order":
        monkeypatch.setattr(InFourBits, "order", torch.arange(256))
        wide = tensors  # they are read as floats, which the source does not round
    experts = build.weight_format.experts(source, shape, share_of(build.group, shape.width), NAMES)
    assert isinstance(experts, cuda_experts.CudaExperts)
    assert experts.four_bits == ("" if kind == "in another order" else "int4")
    assert error(experts(norm_of(tensors, shape), x, None), expected(x.cpu(), wide, shape)) < 3e-3


def test_two_ranks_hold_parts_of_experts_in_int4() -> None:
    shape = replace(SHAPE, width=128)
    tensors, x = halved(draw(shape)), inputs(FEW)
    wide, total = in_int4(tensors, lambda name: 32 if "w2" in name else 64), torch.zeros(FEW, SHAPE.hidden)
    for rank in range(2):
        build = replace(MAKE, weight_format=Int4Format(INT4, CudaProducts()), group=Imagined(rank, 2))
        source, share = InFourBits(tensors, build), share_of(build.group, shape.width)
        experts = build.weight_format.experts(source, shape, share, NAMES)
        total += experts(norm_of(tensors, shape), x, None).cpu().float()
    assert error(total, expected(x.cpu(), wide, shape)) < 3e-3


def in_nvfp4(tensors: dict[str, torch.Tensor], tool: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return drawn experts as a tool stores them, and widened."""
    narrow, wide = dict(tensors), dict(tensors)
    for seed, name in enumerate(name for name in tensors if ".experts." in name):
        packed, wide[name] = pack(*draw_nvfp4(*narrow.pop(name).shape, seed), tool)
        narrow |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
    return narrow, wide


@each_value(tool=list(TOOLS), rows=[FEW, MANY], ranks=[1, 2])
def test_experts_in_nvfp4(tool: str, rows: int, ranks: int) -> None:
    shape, scheme = replace(SHAPE, width=128), Nvfp4Scheme(tool)
    narrow, wide = in_nvfp4(halved(draw(shape)), tool)
    x, total = inputs(rows), torch.zeros(rows, shape.hidden)
    for rank in range(ranks):
        build = replace(MAKE, weight_format=Nvfp4Format(scheme, CudaProducts()))
        build = replace(build, group=Imagined(rank, ranks)) if ranks > 1 else build
        source, share = Nvfp4Source(Named(narrow, build), scheme), share_of(build.group, shape.width)
        experts = build.weight_format.experts(source, shape, share, NAMES)
        assert isinstance(experts, cuda_experts.CudaExperts) and experts.four_bits == "nvfp4"
        total += experts(norm_of(wide, shape), x, None).cpu().float()
    assert error(total, expected(x.cpu(), wide, shape)) < 3e-3


def test_experts_are_rounded_to_nvfp4() -> None:
    tensors, x = halved(draw(SHAPE)), inputs(FEW)
    wide = tensors | {
        name: Nvfp4Weight.of(tensor.to(DEVICE)).widen(torch.float32).cpu()  # a GPU divides by a scalar less exactly
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    rounding = Nvfp4Format(Nvfp4Scheme("modelopt"), CudaProducts(), rounds=True)
    experts = load(tensors, build=replace(MAKE, weight_format=rounding))
    assert error(experts(norm_of(tensors), x, None), expected(x.cpu(), wide, SHAPE)) < 3e-3


GPT_OSS = replace(SHAPE, hidden=96, width=160, activation="clamped_swish", bias=True)


def drawn_with_biases(shape: ExpertShape) -> dict[str, torch.Tensor]:
    """Return experts of numbers that MXFP4 holds, and biases."""
    tensors = draw(shape)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.startswith("moe.")]:
        if ".experts." in name:
            tensors[name] = widen_mxfp4(*round_mxfp4(tensors[name]), torch.float32)
        tensors[name.replace(".weight", ".bias")] = torch.randn(len(tensors[name]), generator=generator)
    return halved(tensors)


def stacked_tensors(tensors: dict[str, torch.Tensor], shape: ExpertShape) -> dict[str, torch.Tensor]:
    """Return the same experts as gpt-oss stores them."""

    def whole(letter: str, kind: str) -> np.ndarray:
        return torch.stack([tensors[f"moe.experts.{n}.{letter}.{kind}"] for n in range(shape.count)]).float().numpy()

    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    gate_up = {kind: np.stack([whole("w1", kind), whole("w3", kind)], 2) for kind in ("weight", "bias")}
    down = {kind: whole("w2", kind) for kind in ("weight", "bias")}
    gate_up = {kind: values.reshape(shape.count, -1, *values.shape[3:]) for kind, values in gate_up.items()}
    for name, values in (("gate_up", gate_up), ("down", down)):
        blocks, scales = packed(values["weight"])
        found[f"moe.experts.{name}_blocks"] = torch.from_numpy(blocks)
        found[f"moe.experts.{name}_scales"] = torch.from_numpy(scales)
        found[f"moe.experts.{name}_bias"] = torch.from_numpy(values["bias"]).half()
    return found


STACKED = replace(NAMES, stacked=StackedExpertNames(gate_up="moe.experts.gate_up", down="moe.experts.down"))


@each_value(kind=["mxfp4", "float"], rows=[FEW, MANY])
def test_experts_of_gpt_oss(kind: str, rows: int) -> None:
    tensors, x = drawn_with_biases(GPT_OSS), inputs(rows, 96)
    norm, wanted = norm_of(tensors, GPT_OSS), expected(x.cpu(), tensors, GPT_OSS)
    if kind == "float":
        experts = load(tensors, GPT_OSS)
    else:
        experts = load_stacked(stacked_tensors(tensors, GPT_OSS), SingleRank())
    assert error(experts(norm, x, None), wanted) < 3e-3


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up_to_the_experts_of_gpt_oss(size: int) -> None:
    """Two ranks have 3 and 2 of five blocks of 32. Four ranks would have 2, 2, 1 and none."""
    tensors, x = drawn_with_biases(GPT_OSS), inputs(FEW, 96)
    norm, wanted = norm_of(tensors, GPT_OSS), expected(x.cpu(), tensors, GPT_OSS)
    stacked = stacked_tensors(tensors, GPT_OSS)
    if size == 4:
        with pytest.raises(ConfigError, match="5 blocks cannot be divided among 4 processes"):
            load_stacked(stacked, Imagined(3, 4))
        return
    parts = [load_stacked(stacked, Imagined(rank, size))(norm, x, None) for rank in range(size)]
    assert error(sum(parts), wanted) < 3e-3


@pytest.mark.parametrize(
    ("dtype", "scale", "message"),
    [(torch.float16, 141, "float16 does not hold"), (torch.bfloat16, 191, "above 2\\^63")],
)
def test_scales_that_the_kernels_do_not_hold_are_rejected(dtype: torch.dtype, scale: int, message: str) -> None:
    tensors = stacked_tensors(drawn_with_biases(GPT_OSS), GPT_OSS)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    tensors["moe.experts.down_scales"][1, 2, 0] = scale
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load_stacked(tensors, SingleRank(), dtype)
    tensors["moe.experts.down_scales"][1, 2, 0] = scale - 1
    load_stacked(tensors, SingleRank(), dtype)


def load_stacked(tensors: dict[str, torch.Tensor], group: RankGroup, dtype: torch.dtype = torch.float16) -> Experts:
    build = replace(MAKE, group=group, weight_format=Mxfp4Format(widens=False), dtype=dtype)
    source = apart(Named(tensors, build), GPT_OSS, STACKED)
    share = Share(0, GPT_OSS.width, GPT_OSS.width)  # the format divides whole blocks itself
    return build.weight_format.experts(source, GPT_OSS, share, STACKED)


class Drawn(Named):
    """Source of tensors that are not stored."""

    def stored(self, name: str) -> None:
        return None


def test_drawn_experts_are_rounded_to_mxfp4() -> None:
    tensors, x = drawn_with_biases(GPT_OSS), inputs(FEW, 96)
    build = replace(MAKE, weight_format=Mxfp4Format(widens=False))
    experts = build.weight_format.experts(Drawn(tensors, build), GPT_OSS, Share(0, GPT_OSS.width, GPT_OSS.width), NAMES)
    wanted = expected(x.cpu(), tensors, GPT_OSS)
    assert error(experts(norm_of(tensors, GPT_OSS), x, None), wanted) < 3e-3


def test_more_tokens_than_steps_mostly_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_experts, "MAX_TOKENS", 16)
    tensors, x = halved(draw(SHAPE)), inputs(MANY)
    assert error(load(tensors)(norm_of(tensors), x, None), expected(x.cpu(), tensors, SHAPE)) < 3e-3


def test_no_tokens() -> None:
    tensors, x = halved(draw(SHAPE)), inputs(0)
    experts = load(tensors)
    assert experts(norm_of(tensors), x, x).shape == (0, 256)
    assert experts(norm_of(tensors), x, None).shape == (0, 256)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_ranks_add_up_to_the_whole(rows: int) -> None:
    tensors, x = halved(draw(SHAPE)), inputs(rows)
    ranks = [load(tensors, build=replace(MAKE, group=Imagined(rank, 2))) for rank in range(2)]
    norm, before = norm_of(tensors), x.double().cpu()
    parts = [experts(norm, x, residual) for experts, residual in zip(ranks, (x.clone(), None), strict=True)]
    assert error(sum(parts) - before.to(DEVICE), expected(x.cpu(), tensors, SHAPE)) < 5e-3


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_captured_layer_follows_its_inputs(rows: int) -> None:
    """Each replay finds out which experts have tokens, and how many."""
    tensors, x = halved(draw(SHAPE)), inputs(rows)
    experts, norm = load(tensors), norm_of(tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        experts(norm, x, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = experts(norm, x, None)
    for seed in range(3):
        # The last inputs are all alike, so that all tokens go to the same experts.
        x.copy_(torch.randn(rows if seed else 1, SHAPE.hidden, device=DEVICE))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, experts(norm, x, None))


def test_unsupported_models_are_rejected() -> None:
    with pytest.raises(ConfigError, match="on a GPU, models with experts need dtype=bfloat16 or dtype=float16"):
        load(draw(SHAPE), build=replace(MAKE, dtype=torch.float32))
    odd = replace(SHAPE, width=36)
    with pytest.raises(UnsupportedModelError, match=r"width 36 in a model of width 256 .* multiples of 8"):
        load(draw(odd), odd)
    tensors, wide = in_blocks(draw(SHAPE))
    for number in range(SHAPE.count):
        tensors[f"moe.experts.{number}.w2.weight"] = wide[f"moe.experts.{number}.w2.weight"]
    kept = Fp8Format(Fp8Scheme("block"), rounds=False, widens=False)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.w2: .* only some matrices are in FP8"):
        load(tensors, build=replace(MAKE, weight_format=kept))
