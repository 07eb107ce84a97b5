"""Output heads in FP8, against the same model whose head was rounded beforehand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.core.errors import ConfigError
from roseinfer.quant.fp8_weight import Fp8Weight
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.loaded import TOKENS, load, logits

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def rounded(folder: Path) -> None:
    """Round the stored head to what FP8 represents."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    save_file(tensors | {"lm_head.weight": Fp8Weight.nearest(head).widen(head.dtype)}, path, {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wanted = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "tie_word_embeddings": False}
    return save_reference(make_reference("llama", **wanted), tmp_path)


def test_only_the_head_is_rounded(folder: Path) -> None:
    plain, found = logits(load(folder)), load(folder, lm_head_dtype="fp8")
    assert found.weights == "float32, output head in fp8, widened"
    got = logits(found)
    rounded(folder)
    torch.testing.assert_close(got, logits(load(folder)))
    assert not torch.equal(got, plain)


def test_a_tied_model_looks_rows_up_unrounded(tmp_path: Path) -> None:
    folder = save_reference(make_reference("llama", tie_word_embeddings=True), tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    model = load(folder, lm_head_dtype="fp8")
    hidden = torch.randn(3, embedding.shape[1])
    expected = model.normed(hidden) @ Fp8Weight.nearest(embedding).widen(torch.float32).T
    torch.testing.assert_close(model.logits(hidden), expected)
    plain = load(folder)
    assert torch.equal(model.embed(torch.tensor(TOKENS)), plain.embed(torch.tensor(TOKENS)))


def test_a_head_in_int8_stays(folder: Path) -> None:
    with pytest.raises(ConfigError, match="lm_head_dtype must be auto where weights are in int8"):
        load(folder, quantization="int8", lm_head_dtype="fp8")


@pytest.mark.skipif(not HOPPER, reason="FP8 products need a Hopper GPU")
@pytest.mark.parametrize(("rows", "error"), [(1, 0.01), (40, 0.05)], ids=["one row", "rows rounded to FP8"])
def test_a_gpu_multiplies_by_the_codes(folder: Path, rows: int, error: float) -> None:
    model = load(folder, lm_head_dtype="fp8", device=torch.device("cuda"), dtype="bfloat16")
    assert model.weights == "bfloat16, output head in fp8"
    head = Fp8Weight.nearest(load_file(folder / "model.safetensors")["lm_head.weight"].bfloat16()).widen(torch.float32)
    hidden = torch.randn(rows, head.shape[1], device="cuda", dtype=torch.bfloat16)
    expected = model.normed(hidden).float().cpu() @ head.T
    difference = model.logits(hidden).float().cpu() - expected
    assert difference.norm() < error * expected.norm()
