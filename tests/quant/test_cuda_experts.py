"""`CudaExperts` against the formula in float64, few tokens and many, in 16 bits and in FP8.

On a CPU its kernels run under Triton's interpreter, which has no products of bfloat16.
"""

from dataclasses import replace

import pytest
import torch

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.layers.norm import RMSNorm
from roseinfer.parallel.group import share_of
from roseinfer.quant import cuda_experts, fp8_format, plain
from roseinfer.quant.base import Build, ExpertNames, Experts, ExpertShape
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_weight import Fp8Weight
from tests.helpers.interpreter import allow_loaded_loop_bounds, round_codes
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
    allow_loaded_loop_bounds(monkeypatch)
    round_codes()
    for module in (plain, fp8_format):
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


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_experts_in_16_bits(rows: int, renormalise: bool) -> None:
    shape = replace(SHAPE, renormalise=renormalise, hidden=72, width=40)
    tensors, x = halved(draw(shape)), inputs(rows, 72)
    wanted = expected(x.cpu(), tensors, shape)
    experts, norm = load(tensors, shape), norm_of(tensors, shape)
    before = x.clone()
    assert error(experts(norm, x, None), wanted) < 3e-3
    assert torch.equal(x, before), "without a residual nothing is overwritten"
    assert error(experts(norm, x, x) - before, wanted) < 5e-3


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("layout", ["block", "channel"])
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
    with pytest.raises(ConfigError, match="on a GPU, models with experts need dtype bfloat16 or float16"):
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
