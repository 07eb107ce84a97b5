"""Weights that a checkpoint stores in NVFP4: read as they are, or widened for readers that expect floats.

compressed-tensors stores `weight_packed` uint8 [N, K / 2], `weight_scale` e4m3 [N, K / 16] and `weight_global_scale`
float32, which divides the scales. modelopt calls these `weight`, `weight_scale` and `weight_scale_2`, which multiplies
them. The code of an even column is in the low bits.
"""

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.mxfp4_codes import e2m1_numbers
from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightPiece, WeightSource
from roseinfer.quant.fp8_stored import read_scalar
from roseinfer.quant.int4_layouts.nibbles import unpacked
from roseinfer.quant.nvfp4_scheme import GROUP_COLUMNS, Nvfp4Scheme
from roseinfer.quant.nvfp4_weight import MAX_NUMBER, Nvfp4Weight
from roseinfer.quant.packed_source import PackedSource

_CODES_DTYPE = "U8"
_NAN_BITS = 0x7F  # the code of a NaN, of scales that are not negative the largest
_TOOLS = {
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
}


class Nvfp4Source(PackedSource):
    """`PackedSource` of NVFP4. Scales of inputs are not used, since activations are not rounded."""

    def __init__(self, inner: WeightSource, scheme: Nvfp4Scheme) -> None:
        codes, self._matrix_scale, self._input_scale = _TOOLS[scheme.layout]
        self._divides = scheme.layout == "compressed-tensors"
        super().__init__(inner, codes, ("weight_scale", self._matrix_scale, self._input_scale), "NVFP4")

    def has_codes(self, layer: str) -> bool:
        held = self._inner.stored(f"{layer}.{self._codes}")
        return held is not None and held.dtype == _CODES_DTYPE

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return codes[0], 2 * codes[1]

    def widened(self, piece: WeightPiece, dtype: torch.dtype) -> torch.Tensor:
        codes, scales, whole = self._read(piece)
        wide = scales.to(torch.float32)
        factors = wide / whole if self._divides else wide * whole
        numbers = e2m1_numbers(unpacked(codes)).unflatten(1, (-1, GROUP_COLUMNS)).mul_(factors[:, :, None])
        return numbers.flatten(1).to(dtype)

    def read_nvfp4(self, piece: WeightPiece) -> Nvfp4Weight:
        """Read a piece that is stored in NVFP4.

        Raise `UnsupportedModelError` naming an unsuitable tensor.
        """
        codes, scales, whole = self._read(piece)
        factor = 1 / whole if self._divides else whole
        if not bool(factor * MAX_NUMBER < torch.finfo(torch.float16).max):
            name = f"{piece.name}.{self._matrix_scale}"
            raise UnsupportedModelError(f"tensor {name}: a GPU supports weights within the range of float16")
        return Nvfp4Weight(codes, scales, factor.expand(len(codes)))

    def _read(self, piece: WeightPiece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes [N, K / 2] and scales [N, K / 16] of a piece, and the scale [] of its matrix."""
        source, name, outs, ins = self._inner, piece.name, piece.outs, piece.ins
        codes = torch.empty(outs.width, ins.width // 2, dtype=torch.uint8, device=self.build.device)
        shard = (outs, _divided(name, ins, 2))
        source.read(f"{name}.{self._codes}", codes, shard=shard)
        groups = _divided(name, ins, GROUP_COLUMNS)
        scales = torch.empty(outs.width, groups.width, dtype=torch.float8_e4m3fn, device=self.build.device)
        source.read(f"{name}.weight_scale", scales, shard=(outs, groups))
        if f"{name}.{self._input_scale}" in source:
            source.skip(f"{name}.{self._input_scale}")
        whole = read_scalar(source, f"{name}.{self._matrix_scale}")
        if not bool(whole > 0):
            raise UnsupportedModelError(f"tensor {name}.{self._matrix_scale} is not positive")
        if bool((scales.view(torch.uint8) >= _NAN_BITS).any()):  # a sign follows in larger bits
            raise UnsupportedModelError(f"tensor {name}.weight_scale holds NaN or negative numbers")
        return codes, scales, whole


def _divided(name: str, ins: Share, unit: int) -> Share:
    """Return a share in units of columns. Raise `UnsupportedModelError` if it would cut one."""
    if ins.start % unit or ins.width % unit or ins.whole % unit:
        why = "" if ins.is_all else ", as tensor_parallel_size asks for"
        end = ins.start + ins.width
        raise UnsupportedModelError(f"{name}: weights in NVFP4 cannot be cut at inputs {ins.start} and {end}{why}")
    return Share(ins.start // unit, ins.width // unit, ins.whole // unit)
