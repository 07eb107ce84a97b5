"""A weight format is one class that no model knows: here one of the tests' own, whole and split."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.layers.linear import Linear, Split
from roseinfer.models.loader import Checkpoint
from roseinfer.parallel.group import Share
from roseinfer.quant.base import (
    Epilogue,
    ExpertNames,
    Experts,
    ExpertShape,
    Matmul,
    Table,
    WeightFormat,
    WeightPiece,
    WeightSource,
)
from roseinfer.quant.cpu_matmul import PlainMatmul
from roseinfer.quant.experts import load_sequential_experts
from roseinfer.quant.plain import PlainFormat, PlainTable
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.loaded import load, logits
from tests.helpers.weights import Imagined, build_for

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ChannelFp8:
    """e4m3 weights with a scale for each output, `X.weight_scale` [out, 1]: widened while they load."""

    stored_as: str | None = "the tests' own"

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        return PlainMatmul(torch.cat([self._widened(source, piece) for piece in pieces]), None, epilogue)

    def form(self, source: WeightSource, name: str) -> str:
        return name

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        return load_sequential_experts(self, source, shape, share, names)

    def table(self, rows: torch.Tensor) -> Table:
        return PlainTable(rows)

    def _widened(self, source: WeightSource, piece: WeightPiece) -> torch.Tensor:
        codes = torch.empty(piece.outs.width, piece.ins.width, dtype=torch.float8_e4m3fn)
        scales = torch.empty(piece.outs.width, 1)
        source.read(f"{piece.name}.weight", codes, shard=(piece.outs, piece.ins), transposed=piece.transposed)
        source.read(f"{piece.name}.weight_scale", scales, shard=(piece.outs, Share(0, 1, 1)))
        return codes.float() * scales


def quantise(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a checkpoint in FP8, and the same widened again."""
    narrow, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.split(".")[-2] in LAYERS]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
        narrow |= {name: codes, f"{name}_scale": scale}
        wide[name] = codes.float() * scale
    return narrow, wide


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_reference(make_reference("llama"), folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write the checkpoint in FP8 and widened; return both folders."""
    first = save_reference(make_reference("llama"), tmp_path_factory.mktemp("first"))
    narrow, wide = quantise(load_file(first / "model.safetensors"))
    return save(tmp_path_factory.mktemp("narrow"), narrow), save(tmp_path_factory.mktemp("wide"), wide)


def test_a_model_in_a_format_it_does_not_know(folders: tuple[Path, Path]) -> None:
    narrow, wide = folders
    torch.testing.assert_close(logits(load(narrow, weight_format=ChannelFp8())), logits(load(wide)))


def test_each_format_reads_the_ranks_parts_of_the_whole(folders: tuple[Path, Path]) -> None:
    """Two ranks' outputs side by side, and sums of products by their halves of the inputs, are those of the whole."""
    cases: list[tuple[Path, WeightFormat]] = [(folders[0], ChannelFp8()), (folders[1], PlainFormat())]
    name = "model.layers.0.mlp.up_proj"
    x = torch.randn(3, 32)
    expected = x @ load_file(folders[1] / "model.safetensors")[f"{name}.weight"].T
    for folder, weight_format in cases:
        parts = []
        for rank in range(2):
            build = build_for(Imagined(rank, 2), weight_format)
            with Checkpoint(folder, build) as checkpoint:
                layer = Linear(32, 48, split=Split.OUTPUTS)
                layer.load(checkpoint, name)
                parts.append(layer(x))
        torch.testing.assert_close(torch.cat(parts, 1), expected)


def test_quantised_weights_are_not_read_as_floats(folders: tuple[Path, Path]) -> None:
    """Copied into a wider tensor, e4m3 would silently lose its scale."""
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight has dtype F8_E4M3"):
        load(folders[0])
    with pytest.raises(UnsupportedModelError, match=r"weight_scale is missing"):
        load(folders[1], weight_format=FloatCodes())


class FloatCodes(ChannelFp8):
    """Format that accepts float weights as codes, to get as far as the scales."""

    def _widened(self, source: WeightSource, piece: WeightPiece) -> torch.Tensor:
        scales = torch.empty(piece.outs.width, 1)
        source.read(f"{piece.name}.weight_scale", scales)
        return scales


def test_superfluous_scales_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    extra = "model.layers.0.self_attn.q_proj.weight_scale"
    with pytest.raises(UnsupportedModelError, match=extra):
        load(save(tmp_path, {**tensors, extra: torch.ones(32, 1)}))
