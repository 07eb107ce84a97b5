"""Linear layers with weights in four bits: as a checkpoint stores them, or rounded while they load."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.availability import has_triton
from roseinfer.parallel.group import Share
from roseinfer.quant.base import Epilogue, ExpertNames, Experts, ExpertShape, Matmul, Table, WeightPiece, WeightSource
from roseinfer.quant.int4_part import Int4Part, Int4Reader
from roseinfer.quant.int4_scheme import Int4Groups, Int4Scheme
from roseinfer.quant.int4_stored import read_experts, read_stack
from roseinfer.quant.int4_weight import GROUPS, Int4Weight
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from roseinfer.quant.plain import PlainFormat, plain_matmul, read_bias, read_weight

if TYPE_CHECKING:  # needs Triton
    from roseinfer.kernels.linear.int4_product import Int4Workspace

# Columns in a group of layers that are rounded here, and a divisor of the columns of all layers in four bits.
DEFAULT_GROUP_COLUMNS, _MULTIPLE_COLUMNS = 128, 8
# Makes a product by a weight with its bias and epilogue. The last argument is `Int4Part.inputs`.
MakeProduct = Callable[[Int4Weight | Nvfp4Weight, torch.Tensor | None, Epilogue, torch.Tensor | None], Matmul]


class Int4Format:
    """`WeightFormat` for weights in four bits. Experts stay in them unless their columns are not in order.

    A layer whose columns are not in the order of its inputs gathers them. Where the layer before it writes nothing
    else, that one's outputs are sorted instead, while they load.
    """

    def __init__(self, stored: Int4Scheme | None, product: MakeProduct | None, *, rounds: bool = False) -> None:
        """stored: the checkpoint's scheme, if it has one.

        product: None to multiply by the widened weights, for a device that does not keep them in four bits. rounds:
        round layers that the checkpoint stores as floats, except for those that `stored` ignores.
        """
        self._stored = stored
        self._rounds = rounds
        self._scheme = stored or Int4Scheme("awq", Int4Groups(DEFAULT_GROUP_COLUMNS, symmetric=False))
        self._product = product
        self._plain = PlainFormat()
        self._sorted: set[str] = set()  # layers whose inputs come in the order of their columns

    @property
    def stored_as(self) -> str:
        return f"{self._scheme.label}, widened" if self._product is None else self._scheme.label

    def load(self, source: WeightSource, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        part = None if self._product is None else read_stack(source, pieces)
        if part is None and self._rounds:
            part = self._rounded(source, pieces)
        if part is None:
            return self._plain.load(source, pieces, epilogue)
        if self._product is None:
            return plain_matmul(part.weight.widen(source.build.dtype), read_bias(source, pieces), epilogue)
        weight, bias = part.weight, read_bias(source, pieces)
        inputs = None if pieces[0].name in self._sorted else part.inputs
        order = self._wanted_order(source, pieces)
        if order is not None:
            weight, bias = _with_rows(weight, order), None if bias is None else bias[order]
        try:
            return self._product(weight, bias, epilogue, inputs)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{', '.join(piece.name for piece in pieces)}: {error}") from None

    def _rounded(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> Int4Part | None:
        """Return the layer's weight, stored as floats, rounded; None if it is not to be in four bits."""
        columns, size = pieces[0].ins.width, self._scheme.groups.size
        group = next((group for group in (size or columns, *reversed(GROUPS)) if columns % group == 0), None)
        if group is None or columns % _MULTIPLE_COLUMNS or any(self._scheme.ignores(piece.name) for piece in pieces):
            return None
        outs = sum(piece.outs.width for piece in pieces)
        weight = Int4Weight.empty(outs, columns, group, device=source.build.device)
        start = 0
        for piece in pieces:
            weight.part(slice(start, start + piece.outs.width)).round(read_weight(source, [piece]))
            start += piece.outs.width
        return Int4Part(weight)

    def _wanted_order(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> torch.Tensor | None:
        """Return the outputs in the order in which the next layer's columns are; None if it is theirs."""
        following = pieces[0].feeds
        if following is None or source.build.adapting is not None or not isinstance(source, Int4Reader):
            return None  # adapters know no other order
        order = source.order_of(following)
        outs = sum(piece.outs.width for piece in pieces)
        if order is None or source.build.group.size > 1 or outs % len(order):
            return None  # the next layer refuses a wrong number of columns
        self._sorted.add(following)
        return torch.cat([order + start for start in range(0, outs, len(order))])

    def form(self, source: WeightSource, name: str) -> str:
        return name  # matrices may differ in groups and orders

    def experts(self, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames) -> Experts:
        if self._product is None or not has_triton(source.build.device):
            return self._plain.experts(source, shape, share, names)
        from roseinfer.kernels.experts.tiles import Stack  # imports Triton, which only GPUs have
        from roseinfer.quant.cuda_experts import load_cuda_experts
        from roseinfer.quant.int4_experts import expert_codes, keeps

        def read(pieces: Sequence[WeightPiece]) -> Stack:
            bias = read_bias(source, pieces)
            weight = self._expert_weight(source, pieces) if keeps(pieces[0].ins.width) else None
            if weight is None:
                return Stack(read_weight(source, pieces), None, bias)
            try:
                return Stack(*expert_codes(weight), bias)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{pieces[0].name} and its like: {error}") from None

        return load_cuda_experts(source, shape, share, names, read)

    def _expert_weight(self, source: WeightSource, pieces: Sequence[WeightPiece]) -> Int4Weight | None:
        """Return the matrices of experts, one after the other; None if they are not to be in four bits."""
        weight = read_experts(source, pieces)
        if weight is not None or not self._rounds:
            return weight
        part = self._rounded(source, pieces)
        return None if part is None else part.weight

    def table(self, rows: torch.Tensor) -> Table:
        return self._plain.table(rows)


class CudaProducts:
    """`MakeProduct` for one model on a GPU. Its products share a workspace."""

    def __init__(self) -> None:
        self._workspace: Int4Workspace | None = None

    def __call__(
        self,
        weight: Int4Weight | Nvfp4Weight,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        inputs: torch.Tensor | None,
    ) -> Matmul:
        from roseinfer.kernels.linear.int4_product import Int4Workspace  # imports Triton, which only GPUs have
        from roseinfer.quant.int4_matmul import Int4Matmul

        if self._workspace is None:
            self._workspace = Int4Workspace.allocate(weight.codes.device)
        return Int4Matmul(weight, bias, epilogue, inputs, self._workspace)


def _with_rows(weight: Int4Weight, rows: torch.Tensor) -> Int4Weight:
    offsets = None if weight.offsets is None else weight.offsets[rows]
    return Int4Weight(weight.codes[rows], weight.scales[rows], offsets)
