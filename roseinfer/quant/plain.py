"""Weights that are not quantised: in the dtype that the model computes in. On a CPU they are packed where that pays."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import Share
from roseinfer.quant.base import (
    FLOATS,
    NO_EPILOGUE,
    Epilogue,
    ExpertNames,
    Experts,
    ExpertShape,
    Matmul,
    WeightPiece,
    WeightSource,
)
from roseinfer.quant.cpu_matmul import PackedMatmul, PlainMatmul, can_pack
from roseinfer.quant.experts import load_sequential_experts


class PlainFormat:
    """`WeightFormat` without quantisation."""

    def __init__(self, stored_as: str | None = None) -> None:
        """stored_as: description of weights that the checkpoint stores otherwise, and that are widened."""
        self.stored_as = stored_as

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        return plain_matmul(read_weight(source, pieces), read_bias(source, pieces), epilogue)

    def form(self, source: WeightSource, name: str) -> str:
        return FLOATS

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        if has_triton(source.build.device):
            from roseinfer.kernels.experts.tiles import Stack  # imports Triton, which only GPUs have
            from roseinfer.quant.cuda_experts import load_cuda_experts

            def read(pieces: Sequence[WeightPiece]) -> Stack:
                return Stack(read_weight(source, pieces), None, read_bias(source, pieces))

            return load_cuda_experts(source, shape, share, names, read)
        return load_sequential_experts(self, source, shape, share, names)

    def table(self, rows: torch.Tensor) -> "PlainTable":
        return PlainTable(rows)


class PlainTable:
    """`Table` without quantisation. On a GPU the head shares the matrix.

    A CPU packs a second one for the head (GPT-2: 154 MB in float32): rows are looked up in the plain layout, and the
    head is a large part of the weights that a step reads.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self.look_up: Callable[[torch.Tensor], torch.Tensor] = partial(F.embedding, weight=rows)

    def head(self) -> Matmul:
        return plain_matmul(self._rows, None)


def read_weight(source: WeightSource, pieces: Sequence[WeightPiece]) -> torch.Tensor:
    """Read the matrices of `pieces`, stacked in their order: [their rows, in] in the model's dtype."""
    build = source.build
    outs = sum(piece.outs.width for piece in pieces)
    weight = torch.empty(outs, pieces[0].ins.width, dtype=build.dtype, device=build.device)
    start = 0
    for piece in pieces:
        rows = slice(start, start + piece.outs.width)
        shard = (piece.outs, piece.ins)
        source.read(f"{piece.name}.weight", weight[rows], shard=shard, transposed=piece.transposed)
        start = rows.stop
    return weight


def read_bias(source: WeightSource, pieces: Sequence[WeightPiece]) -> torch.Tensor | None:
    """Read the biases of a layer's pieces, stacked in their order, in the model's dtype; None without biases."""
    if not pieces[0].bias:
        return None
    build = source.build
    bias = torch.empty(sum(piece.outs.width for piece in pieces), dtype=build.dtype, device=build.device)
    start = 0
    for piece in pieces:
        source.read(f"{piece.name}.bias", bias[start : start + piece.outs.width], shard=(piece.outs,))
        start += piece.outs.width
    return bias


def plain_matmul(weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue = NO_EPILOGUE) -> Matmul:
    """Return the fastest product by a loaded weight, such as tied embeddings, on this machine.

    To free the plain copy, the caller drops its own reference to `weight`.
    """
    if has_triton(weight.device):
        from roseinfer.quant.cuda_matmul import CudaMatmul  # imports Triton, which only GPUs have

        return CudaMatmul(weight, bias, epilogue)
    kind = PackedMatmul if can_pack(weight) else PlainMatmul
    return kind(weight, bias, epilogue)
