"""Sizes of weights in memory, calculated from headers of files."""

from pathlib import Path

import numpy as np
import torch

from roseinfer.models.config import read_model_spec
from roseinfer.models.loaded_size import LoadedSize, loaded_size
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.gguf_files import metadata_of, quantised, tensors_of, write
from tests.helpers.int4_files import MAKERS, quantise_folder, write_tensors

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_folders(tmp_path: Path) -> None:
    """Count scales as weights, which adds some per cent."""
    reference = make_reference("qwen3", **SIZES)
    save_reference(reference, tmp_path)
    total, stored = count(reference), (tmp_path / "model.safetensors").stat().st_size
    assert loaded_size(tmp_path, None) == LoadedSize("floats", 4 * total, None, stored, False, as_stored=True)
    for maker in MAKERS:
        save_reference(reference, tmp_path)
        quantise_folder(tmp_path, maker)
        found = loaded_size(tmp_path, read_model_spec(tmp_path).quantization)
        assert found.four_bits and found.as_stored and found.kinds == f"int4 in groups of {maker.group}"
        assert found.int8_bytes is not None and 1 <= found.int8_bytes / count(reference) < 1.05
        assert found.float_bytes == 4 * found.int8_bytes
        assert found.gpu_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_nvfp4(tmp_path: Path) -> None:
    codes = {"a.weight_packed": torch.zeros(64, 32, dtype=torch.uint8), "norm.weight": torch.ones(64)}
    write_tensors(tmp_path, codes)
    found = loaded_size(tmp_path, Nvfp4Scheme("compressed-tensors"))
    total, stored = 64 * 64 + 64, (tmp_path / "model.safetensors").stat().st_size
    assert found == LoadedSize("nvfp4", 4 * total, total, stored, four_bits=True, as_stored=True)


def test_gguf_files_with_experts(tmp_path: Path) -> None:
    reference = make_reference("qwen3-moe", **SIZES, moe_intermediate_size=256)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        if "_exps" not in name:
            return values.astype(np.float16), "F16"
        raw = quantised("Q4_K", (values.shape[0] * values.shape[1], values.shape[2]))
        return raw.reshape(*values.shape[:2], -1), "Q4_K"

    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors_of(reference, encode))
    total = count(reference)
    in_four = sum(p.numel() for name, p in reference.named_parameters() if ".experts." in name)
    expected = 2 * (total - in_four) + in_four * 5 // 8
    found = loaded_size(path, read_model_spec(path).quantization)
    assert found.four_bits and found.gpu_bytes == expected


def test_gguf_files(tmp_path: Path) -> None:
    reference = make_reference("llama", **SIZES)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        kind = "Q8_0" if "ffn_down" in name else "Q4_K"
        return (
            (quantised(kind, values.shape), kind) if name.startswith("blk.") and values.ndim == 2 else (values, "F32")
        )

    path = write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors_of(reference, encode))
    total, down = count(reference), 2 * 256 * 512
    in_four = sum(p.numel() for name, p in reference.named_parameters() if "proj" in name) - down
    expected = LoadedSize("Q4_K, Q8_0, F32", 4 * total, None, 2 * (total - in_four) + in_four * 5 // 8, four_bits=True)
    assert loaded_size(path, read_model_spec(path).quantization) == expected
