"""Linear layers with weights in FP8: as a checkpoint holds them, or rounded while they load."""

from collections.abc import Sequence

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.availability import has_triton
from roseinfer.quant.base import Epilogue, Matmul, Piece, WeightSource
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_stored import is_fp8, new_weight, part_of, read_codes
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.plain import PlainFormat, plain_matmul, read_bias


class Fp8Format:
    """See `WeightFormat`. Layers that stay in 16 bits are not quantised at all."""

    def __init__(self, stored: Fp8Scheme | None, *, rounds: bool) -> None:
        """`stored`: how the checkpoint keeps what it holds in FP8.

        rounds: whether layers that it holds in floats are rounded to FP8, but for those that `stored` ignores. They get
        a scale for each channel, or for each block where `stored` has such.
        """
        self._stored = stored
        self._rounds = rounds
        self._plain = PlainFormat()

    def load(self, source: WeightSource, pieces: Sequence[Piece], epilogue: Epilogue) -> Matmul:
        coded = [is_fp8(source, f"{piece.name}.weight") for piece in pieces]
        rounded = [self._is_rounded(piece.name) for piece in pieces]
        quantised = [code or rounds for code, rounds in zip(coded, rounded, strict=True)]
        if len({*coded}) > 1 or len({*quantised}) > 1:
            names = ", ".join(piece.name for piece in pieces)
            raise UnsupportedModelError(f"{names}: one product of parts that are not quantised alike is not supported")
        if not quantised[0]:
            return self._plain.load(source, pieces, epilogue)
        block = self._stored is not None and self._stored.layout == "block"
        weight = new_weight(pieces, source.build.device, block=block)
        start = 0
        for piece in pieces:
            part = part_of(weight, start, piece.outs.width)
            if coded[0]:
                self._read(source, piece, part)
            else:
                _round(source, piece, part)
            start += piece.outs.width
        return fp8_matmul(weight, read_bias(source, pieces), epilogue, source.build.dtype)

    def head(self, table: torch.Tensor) -> Matmul:
        return self._plain.head(table)

    def _is_rounded(self, name: str) -> bool:
        return self._rounds and not (self._stored is not None and self._stored.ignores(name))

    def _read(self, source: WeightSource, piece: Piece, into: Fp8Weight) -> None:
        if self._stored is None:
            raise UnsupportedModelError(f"tensor {piece.name}.weight is in FP8, of which config.json says nothing")
        read_codes(source, self._stored, piece, into)


def fp8_matmul(weight: Fp8Weight, bias: torch.Tensor | None, epilogue: Epilogue, dtype: torch.dtype) -> Matmul:
    """The product by `weight` [N, K] in `dtype`.

    Raises `UnsupportedModelError` for a shape that a GPU's products in FP8 do not take. A CPU, which gains nothing from
    FP8, multiplies by the widened weight, and so does a GPU in float32, which is asked for to be exact.
    """
    if has_triton(weight.codes.device) and dtype is not torch.float32:
        from roseinfer.quant.fp8_matmul import Fp8Matmul  # imports Triton, which only GPUs have

        return Fp8Matmul(weight, bias, epilogue)
    return plain_matmul(weight.widen(dtype), bias, epilogue)


def _round(source: WeightSource, piece: Piece, into: Fp8Weight) -> None:
    wide = torch.empty(into.codes.shape, dtype=source.build.dtype, device=source.build.device)
    source.read(f"{piece.name}.weight", wide, shard=(piece.outs, piece.ins), transposed=piece.transposed)
    rounded = Fp8Weight.of(wide, block=into.is_block)
    into.codes.copy_(rounded.codes)
    into.scales.copy_(rounded.scales)
