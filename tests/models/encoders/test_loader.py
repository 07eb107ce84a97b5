"""Checkpoints of encoders: tensors that are missing, unexpected or drawn at random."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from tests.helpers.encoders import ENCODERS, RERANKERS, draw_rows, hidden_states, load, make_encoder, pack
from tests.helpers.weights import Imagined


@pytest.fixture(params=["bert", "xlm-r", "modernbert"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_encoder(RERANKERS[request.param]).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace or add a tensor of the checkpoint, or remove it if `tensor` is None."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path)


def names(folder: Path) -> list[str]:
    return list(load_file(folder / "model.safetensors"))


def test_every_tensor_is_needed(folder: Path) -> None:
    """Remove each tensor of one layer, of the embedding and of the head in turn."""
    kept = load_file(folder / "model.safetensors")
    for name in kept:
        if "layer.1." in name or "layers.1." in name or "layer" not in name:
            save_file({other: tensor for other, tensor in kept.items() if other != name}, folder / "model.safetensors")
            with pytest.raises(UnsupportedModelError, match="is missing"):
                load(folder)


def test_an_unexpected_tensor_is_refused(folder: Path) -> None:
    change(folder, "encoder.layer.0.adapter.weight", torch.zeros(2))
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor encoder\.layer\.0\.adapter\.weight"):
        load(folder)


def test_a_misshaped_or_invalid_tensor_is_refused(folder: Path) -> None:
    word = next(name for name in names(folder) if "tok_embeddings.weight" in name or "word_embeddings" in name)
    change(folder, word, torch.full((97, 32), torch.nan))
    with pytest.raises(UnsupportedModelError, match="NaN"):
        load(folder)
    change(folder, word, torch.zeros(96, 32))
    with pytest.raises(UnsupportedModelError, match="is \\[96, 32\\]"):
        load(folder)


@pytest.mark.parametrize("name", ["bert", "xlm-r"])
def test_tensors_without_a_use_are_left_out(name: str, tmp_path: Path) -> None:
    make_encoder(ENCODERS[name]).save_pretrained(tmp_path)
    before = hidden_states(load(tmp_path), pack(draw_rows([5])))
    change(tmp_path, "embeddings.position_ids", torch.arange(64)[None])
    change(tmp_path, "pooler.dense.weight", None)
    after = hidden_states(load(tmp_path), pack(draw_rows([5])))
    assert torch.equal(before[0], after[0])


def test_old_names_of_norms(tmp_path: Path) -> None:
    """Read a checkpoint as google-bert/bert-base-uncased is stored."""
    make_encoder(ENCODERS["bert-masked"]).save_pretrained(tmp_path)
    before = hidden_states(load(tmp_path), pack(draw_rows([5])))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if old != name:
            change(tmp_path, name, None)
            change(tmp_path, old, tensor)
    assert not any("LayerNorm.weight" in name for name in names(tmp_path))
    assert torch.equal(before[0], hidden_states(load(tmp_path), pack(draw_rows([5])))[0])


def test_random_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    one, same, other = (load(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    rows = pack(draw_rows())
    found = [torch.cat(hidden_states(model, rows)) for model in (one, same, other)]
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])
    assert found[0].isfinite().all()


def test_several_processes_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        load(folder, group=Imagined(0, 2))


def test_int8_or_a_clear_reason(folder: Path) -> None:
    """Compare with float32: the layers take any weight format."""
    rows = pack(draw_rows())
    exact = torch.cat(hidden_states(load(folder), rows))
    try:
        model = load(folder, quantization="int8")
    except ConfigError as error:
        pytest.skip(str(error))
    assert model.weights != "float32"
    rounded = torch.cat(hidden_states(model, rows))
    assert 0 < (rounded - exact).square().mean().sqrt() / exact.std() < 0.1
