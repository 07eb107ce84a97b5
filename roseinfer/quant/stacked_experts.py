"""Experts whose matrices a checkpoint stacks in two tensors, read as matrices of their own."""

from collections.abc import Sequence

import torch

from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS, widen_mxfp4
from roseinfer.parallel.group import Share
from roseinfer.quant.base import ExpertNames, ExpertShape, TensorMetadata, WeightSource
from roseinfer.quant.mxfp4 import BLOCKS, SCALES, read_mxfp4

# Parts of the stacked tensors that a name stands for.
_GATE, _UP, _DOWN = range(3)


class StackedExperts:
    """Source that adds the matrices and biases of a layer's experts by number, with gate and up apart.

    gpt-oss stores gate and up as [count, hidden, 2 * width] and down as [count, width, hidden], which are transposed,
    or both as MXFP4, which is not. Row 2i of gate and up is row i of the gate, row 2i + 1 is row i of up. Qwen3.5
    stores [count, 2 * width, hidden], the gate first, and [count, hidden, width].
    """

    def __init__(self, inner: WeightSource, shape: ExpertShape, names: ExpertNames) -> None:
        assert names.stacked is not None, "the family stacks no experts"
        self._inner = inner
        self.build, self.finite = inner.build, inner.finite
        self._shape, self._names = shape, names.stacked
        templates = (names.gate, names.up, names.down)
        self._places = {
            template.format(number): (part, number)
            for number in range(shape.count)
            for part, template in enumerate(templates)
        }
        # Gate and up are read one after the other.
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._places or name in self._inner

    def stored(self, name: str) -> TensorMetadata | None:
        place = self._places.get(name.rpartition(".")[0])
        if place is None:
            return self._inner.stored(name)
        stacked = self._stacked(place[0])
        return self._inner.stored(f"{stacked}{BLOCKS}") or self._inner.stored(stacked)

    def skip(self, name: str) -> None:
        stem, _, kind = name.rpartition(".")
        place = self._places.get(stem)
        if place is None:
            self._inner.skip(name)
        elif kind == "bias":
            self._inner.skip(f"{self._stacked(place[0])}_bias")
        else:
            for stored in self._stored_names(self._stacked(place[0])):
                self._inner.skip(stored)

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        stem, _, kind = name.rpartition(".")
        place = self._places.get(stem)
        if place is None:
            self._inner.read(name, into, shard=shard, transposed=transposed)
            return
        assert not transposed, "these matrices are [out, in]"
        part, number = place
        stacked = self._stacked(part)
        whole = self._bias(stacked, number) if kind == "bias" else self._matrix(stacked, number)
        if part != _DOWN:
            width = self._shape.width
            whole = whole[part * width : (part + 1) * width] if self._names.halves else whole[part::2]
        if shard is not None:
            whole = whole[tuple(slice(share.start, share.start + share.width) for share in shard)]
        into.copy_(whole)

    def _stacked(self, part: int) -> str:
        return self._names.down if part == _DOWN else self._names.gate_up

    def _stored_names(self, stacked: str) -> list[str]:
        is_packed = f"{stacked}{BLOCKS}" in self._inner
        return [f"{stacked}{BLOCKS}", f"{stacked}{SCALES}"] if is_packed else [stacked]

    def _sizes(self, stacked: str) -> tuple[int, int]:
        """Return the outputs and inputs of one expert's matrix."""
        shape = self._shape
        return (shape.hidden, shape.width) if stacked == self._names.down else (2 * shape.width, shape.hidden)

    def _bias(self, stacked: str, number: int) -> torch.Tensor:
        outs, _ = self._sizes(stacked)
        found = torch.empty(1, outs, dtype=self.build.dtype, device=self.build.device)
        shard = (Share(number, 1, self._shape.count), Share(0, outs, outs))
        self._inner.read(f"{stacked}_bias", found, shard=shard)
        return found[0]

    def _matrix(self, stacked: str, number: int) -> torch.Tensor:
        key = (stacked, number)
        if self._last is None or self._last[0] != key:
            self._last = key, self._read_matrix(stacked, number)
        return self._last[1]

    def _read_matrix(self, stacked: str, number: int) -> torch.Tensor:
        build, (outs, ins) = self.build, self._sizes(stacked)
        one = Share(number, 1, self._shape.count)
        if f"{stacked}{BLOCKS}" in self._inner:
            rows, blocks = Share(0, outs, outs), Share(0, -(-ins // BLOCK_ELEMENTS), -(-ins // BLOCK_ELEMENTS))
            codes, scales = read_mxfp4(self._inner, stacked, one, rows, blocks)
            wide = widen_mxfp4(codes[0], scales[0], build.dtype)
            self.finite.add_widened(stacked, wide)
            return wide
        if self._names.halves:
            found = torch.empty(1, outs, ins, dtype=build.dtype, device=build.device)
            self._inner.read(stacked, found, shard=(one, Share(0, outs, outs), Share(0, ins, ins)))
            return found[0]
        found = torch.empty(1, ins, outs, dtype=build.dtype, device=build.device)
        self._inner.read(stacked, found, shard=(one, Share(0, ins, ins), Share(0, outs, outs)))
        return found[0].T


def apart(source: WeightSource, shape: ExpertShape, names: ExpertNames) -> WeightSource:
    """Return a source of the experts' own matrices: `source` itself, unless it stores them stacked."""
    stacked = names.stacked
    if stacked is None:
        return source
    stored = source.stored(stacked.gate_up) or source.stored(f"{stacked.gate_up}{BLOCKS}")
    return source if stored is None else StackedExperts(source, shape, names)
