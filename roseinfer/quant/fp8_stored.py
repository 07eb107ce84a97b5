"""Weights that a checkpoint stores in FP8: read as codes and scales, or widened."""

from collections.abc import Sequence

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.parallel.group import Share
from roseinfer.quant.base import TensorMetadata, WeightPiece, WeightSource
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_weight import Fp8Weight

CODES = "F8_E4M3"  # as safetensors names the dtype
_SCALES = ("weight_scale_inv", "weight_scale")  # both multiply, despite the first one's name
# Scales of static activations. Unused: scaling activations by their actual range is at least as exact.
_OF_INPUTS = ("input_scale", "activation_scale")
_NAN_BITS = 0x7F  # a NaN's code without its sign
# Codes that are checked at a time: the comparison takes twice their memory, and a layer of experts has many.
MAX_CHECKED_ELEMENTS = 1 << 26


def is_fp8(source: WeightSource, name: str) -> bool:
    """Return True if the tensor called `name` is stored as codes."""
    held = source.stored(name)
    return held is not None and held.dtype == CODES


def new_weight(pieces: Sequence[WeightPiece], device: torch.device, *, block: bool) -> Fp8Weight:
    """Return a weight without values for all of `pieces`, stacked in their order.

    Raises `UnsupportedModelError` if a block of scales would cover two pieces, or two ranks' parts of one.
    """
    outs, ins = sum(piece.outs.width for piece in pieces), pieces[0].ins.width
    codes = torch.empty(outs, ins, dtype=torch.float8_e4m3fn, device=device)
    if not block:
        return Fp8Weight(codes, torch.empty(outs, device=device))
    for piece in pieces:
        _check_blocks(piece, piece.ins, is_last=True)
        _check_blocks(piece, piece.outs, is_last=piece is pieces[-1])
    return Fp8Weight(codes, torch.empty(-(-outs // SCALE_BLOCK), -(-ins // SCALE_BLOCK), device=device))


def part_of(weight: Fp8Weight, rows: slice) -> Fp8Weight:
    """Return some rows of a weight, as a view. In a block layout they begin at a multiple of 128."""
    if not weight.is_block:
        return Fp8Weight(weight.codes[rows], weight.scales[rows])
    return Fp8Weight(weight.codes[rows], weight.scales[rows.start // SCALE_BLOCK : -(-rows.stop // SCALE_BLOCK)])


def read_codes(source: WeightSource, scheme: Fp8Scheme, pieces: Sequence[WeightPiece], into: Fp8Weight) -> None:
    """Fill `into` with pieces that are stored as codes, in the layout of `scheme` (one scale for all becomes one a
    channel).

    Raises `UnsupportedModelError` naming a tensor that is unsuitable or contains NaN.
    """
    parts, start = [], 0
    for piece in pieces:
        parts.append(part_of(into, slice(start, start + piece.outs.width)))
        start += piece.outs.width
    for piece, part in zip(pieces, parts, strict=True):
        _read_piece(source, scheme, piece, part)
    # One check of all pieces waits for the GPU only once.
    if not _are_numbers(into) or not _are_scales(into):
        for piece, part in zip(pieces, parts, strict=True):
            _check_numbers(source, piece, part)


def _read_piece(source: WeightSource, scheme: Fp8Scheme, piece: WeightPiece, into: Fp8Weight) -> None:
    weight, scale = f"{piece.name}.weight", _scale_of(source, piece)
    if piece.transposed:
        raise UnsupportedModelError(f"tensor {weight} is transposed, which is not supported in FP8")
    source.read(weight, into.codes, shard=(piece.outs, piece.ins))
    if scheme.layout == "block":
        source.read(scale, into.scales, shard=(_blocks(piece.outs), _blocks(piece.ins)))
    elif scheme.layout == "channel":
        _read_channels(source, scale, piece.outs, into.scales)
    else:
        into.scales.fill_(read_scalar(source, scale))
    for name in _names(piece, _OF_INPUTS):
        if name in source:
            source.skip(name)


def _are_numbers(weight: Fp8Weight) -> bool:
    rows = max(1, MAX_CHECKED_ELEMENTS // weight.codes.shape[1])
    parts = weight.codes.view(torch.uint8).split(rows)
    return not bool(torch.stack([((part & _NAN_BITS) == _NAN_BITS).any() for part in parts]).any())


def _are_scales(weight: Fp8Weight) -> bool:
    return bool((weight.scales.isfinite() & (weight.scales >= 0)).all())


def _check_numbers(source: WeightSource, piece: WeightPiece, weight: Fp8Weight) -> None:
    if not _are_numbers(weight):
        raise UnsupportedModelError(f"tensor {piece.name}.weight holds NaN")
    if not _are_scales(weight):
        scale = _scale_of(source, piece)
        raise UnsupportedModelError(f"tensor {scale} contains an invalid scale: NaN, infinity or a negative number")


def _scale_of(source: WeightSource, piece: WeightPiece) -> str:
    """Return the name of the scales' tensor; if it is missing, the name in common use."""
    return next((name for name in _names(piece, _SCALES) if name in source), f"{piece.name}.weight_scale")


def _names(piece: WeightPiece, last_parts: Sequence[str]) -> list[str]:
    return [f"{piece.name}.{part}" for part in last_parts]


def read_scalar(source: WeightSource, name: str) -> torch.Tensor:
    """Return the single number [] float32 of the tensor called `name`, whatever its dimensions."""
    held = source.stored(name)
    value = torch.empty(1, device=source.build.device)
    if held is not None and held.shape in ((), (1, 1)):
        value = value.view(held.shape)
    source.read(name, value)
    return value.view(())


def _read_channels(source: WeightSource, name: str, outs: Share, into: torch.Tensor) -> None:
    """Read scales of shape [N, 1] or [N]."""
    held = source.stored(name)
    if held is not None and len(held.shape) == 1:
        source.read(name, into, shard=(outs,))
    else:
        source.read(name, into[:, None], shard=(outs, Share(0, 1, 1)))


def _check_blocks(piece: WeightPiece, share: Share, *, is_last: bool) -> None:
    end = share.start + share.width
    if share.start % SCALE_BLOCK or (end % SCALE_BLOCK and not (is_last and end == share.whole)):
        what = f"{piece.name}: FP8 in blocks of {SCALE_BLOCK} x {SCALE_BLOCK}"
        why = "" if share.is_all else ", as tensor_parallel_size asks for"
        raise UnsupportedModelError(f"{what} cannot be cut at {share.start} and {end}{why}")


def _blocks(share: Share) -> Share:
    first, end = share.start // SCALE_BLOCK, -(-(share.start + share.width) // SCALE_BLOCK)
    return Share(first, end - first, -(-share.whole // SCALE_BLOCK))


class WideningSource:
    """Source that widens FP8 codes with scales, for readers that expect plain floats."""

    def __init__(self, inner: WeightSource, scheme: Fp8Scheme) -> None:
        self._inner = inner
        self._scheme = scheme
        self.build, self.finite = inner.build, inner.finite

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def stored(self, name: str) -> TensorMetadata | None:
        return self._inner.stored(name)

    def skip(self, name: str) -> None:
        self._inner.skip(name)

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        if into.dtype is torch.float8_e4m3fn or into.ndim != 2 or not is_fp8(self._inner, name):
            self._inner.read(name, into, shard=shard, transposed=transposed)
            return
        outs, ins = shard or (Share(0, width, width) for width in into.shape)
        piece = WeightPiece(name.removesuffix(".weight"), outs, ins, transposed)
        weight = new_weight([piece], into.device, block=self._scheme.layout == "block")
        read_codes(self._inner, self._scheme, [piece], weight)
        into.copy_(weight.widen(into.dtype))
        self.finite.add_widened(name, into)
