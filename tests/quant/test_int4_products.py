"""Models whose layers multiply in four bits by the kernels of a GPU, against the same weights in float32.

On a CPU the kernels run under Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.models.config import read_model_spec
from roseinfer.quant import int4_format
from roseinfer.quant.base import WeightFormat
from roseinfer.quant.int4_format import CudaProducts, Int4Format
from roseinfer.quant.int4_scheme import Int4Scheme
from roseinfer.quant.nvfp4_format import Nvfp4Format
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.cases import cases
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.gguf_files import metadata_of, quantised, tensors_of, write
from tests.helpers.int4_files import DISORDERED, MAKERS, Int4Maker, quantise_folder
from tests.helpers.interpreter import hurry
from tests.helpers.loaded import load
from tests.helpers.nvfp4_files import quantise_nvfp4

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow"),  # the interpreter's exponentials
]

ON_GPU = torch.cuda.is_available()
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2 if ON_GPU else 1}
# A prompt is cut into chunks of different lengths: each has a kernel of its own.
COUNTS = (1, 7, 12, 20) if ON_GPU else (1, 9)
TOKENS = [(7 * number) % 96 for number in range(sum(COUNTS))]
# Activations and results are rounded to 16 bits: twice what a CPU's products in these dtypes differ by. The interpreter
# has no products in bfloat16.
MAX_RELATIVE_ERRORS = {"bfloat16": 0.03, "float16": 0.005} if ON_GPU else {"float16": 0.005}


def logits(path: Path, device: str, dtype: str, **options: Any) -> torch.Tensor:
    spec = read_model_spec(path)
    runner = HandRunner(load(path, spec, dtype=dtype, device=torch.device(device), **options))
    table = runner.blocks.table(len(TOKENS))
    found, start = [], 0
    for count in COUNTS:
        found += runner.run([HandRow(tokens=TOKENS, table=table, start=start, count=count)])
        start += count
    return torch.cat(found)


def check(path: Path) -> None:
    hurry()
    scheme = read_model_spec(path).quantization
    kept: WeightFormat
    if isinstance(scheme, Nvfp4Scheme):
        kept = Nvfp4Format(scheme, CudaProducts())
    else:
        assert isinstance(scheme, Int4Scheme)
        kept = Int4Format(scheme, CudaProducts())
    expected = logits(path, "cpu", "float32", quantization="floats")
    for dtype, error in MAX_RELATIVE_ERRORS.items():
        # A GPU chooses this format itself.
        options = {} if ON_GPU else {"weight_format": kept}
        found = logits(path, "cuda" if ON_GPU else "cpu", dtype, **options)
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        # A few tokens may choose other experts, at near ties.
        assert errors.quantile(0.9) < error


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_gpu_keeps_four_bits(tmp_path: Path) -> None:
    save_reference(make_reference("qwen2", **SIZES), tmp_path)
    quantise_folder(tmp_path, MAKERS[0])
    model = load(tmp_path, dtype="bfloat16", device=torch.device("cuda"))
    assert model.weights == "int4 in groups of 32"


# Other files have the same codes in another order, which `test_int4_checkpoints` reads.
@cases("maker", [DISORDERED[0]], exhaustive=[*MAKERS, *DISORDERED[1:]])
def test_checkpoints(tmp_path: Path, maker: Int4Maker) -> None:
    save_reference(make_reference("qwen2", **SIZES), tmp_path)
    quantise_folder(tmp_path, maker)
    check(tmp_path)


@cases("tool", ["modelopt"], exhaustive=["compressed-tensors"])
def test_nvfp4(tmp_path: Path, tool: str) -> None:
    save_reference(make_reference("qwen2", **SIZES), tmp_path)
    quantise_nvfp4(tmp_path, tool)
    check(tmp_path)


def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry()
    monkeypatch.setattr(int4_format, "has_triton", lambda device: True)
    save_reference(make_reference("qwen3-moe", **SIZES, moe_intermediate_size=96), tmp_path)
    quantise_folder(tmp_path, MAKERS[0])
    check(tmp_path)


def small(encoding: str, shape: tuple[int, int]) -> np.ndarray:
    """Return blocks of small weights: activations of the others would be beyond float16."""
    data, (block, halves) = quantised(encoding, shape), {"Q4_0": (18, 2), "Q4_K": (144, 4)}[encoding]
    factors = data.reshape(-1, block)[:, :halves].copy().view(np.float16) / 16
    data.reshape(-1, block)[:, :halves] = factors.astype(np.float16).view(np.uint8)
    return data


@cases("encoding", ["Q4_K"], exhaustive=["Q4_0"])
def test_gguf_files(tmp_path: Path, encoding: str) -> None:
    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        layer = name.startswith("blk.") and values.ndim == 2
        return (small(encoding, values.shape), encoding) if layer else (values, "F32")

    reference = make_reference("llama", **SIZES)
    check(write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors_of(reference, encode)))
