"""Layers of a model that adapters may change, recorded while the model is loaded."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch

from roseinfer.adapters.matmul import AdaptedMatmul
from roseinfer.adapters.reader import MAX_ALONE_ELEMENTS, AdapterFile, LowRank, is_finite, some_of
from roseinfer.adapters.slots import DeviceSlots, HostAdapter, LayerShape, LayerSlots
from roseinfer.adapters.step import StepAdapters
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.availability import has_triton
from roseinfer.quant.base import NO_EPILOGUE, AdapterRows, Epilogue, Matmul, WeightPiece

if TYPE_CHECKING:
    from roseinfer.adapters.cuda_sums import AdapterSums

log = logging.getLogger(__name__)

# Files may hold float64.
_MAX_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Module:
    """Matrix of the checkpoint within a layer: consecutive pieces of one name."""

    name: str
    pieces: tuple[WeightPiece, ...]

    @property
    def outs(self) -> int:
        return sum(piece.outs.width for piece in self.pieces)

    def fill(self, change: LowRank, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fill A [rank, in] and B [outs, rank] of this process's part."""
        ins, start = self.pieces[0].ins, 0
        _copy(change.a[:, ins.start : ins.start + ins.width], a)
        for piece in self.pieces:
            rows = change.b[piece.outs.start : piece.outs.start + piece.outs.width]
            _copy(rows, b[start : start + piece.outs.width], change.scale)
            start += piece.outs.width


class AdaptedProduct(Matmul, Protocol):
    """Product with adapters, whose slots are set after the model is loaded."""

    slots: LayerSlots


class Adapting:
    """`LayerAdapting` of one model. `step`: adapters of the rows of the current step. `model`: name of the model, as
    the user gives it; empty if unknown.
    """

    model: str = ""

    def __init__(self, prefixes: Iterable[str], device: torch.device) -> None:
        """prefixes: of tensors' names, which adapters of the same model may have or lack. device: the model's."""
        self._prefixes = sorted({prefix for prefix in prefixes if prefix}, key=len, reverse=True)
        self._layers: list[tuple[_Module, ...]] = []
        self._products: list[AdaptedProduct] = []
        self._device = device
        self._many_sums: AdapterSums | None = None  # on a GPU
        self.step = StepAdapters()

    # --- while the model is loaded ------------------------------------------------------------------------------
    def adapt(self, matmul: Matmul, pieces: Sequence[WeightPiece], epilogue: Epilogue) -> Matmul:
        modules = tuple(
            _Module(self._key(name), tuple(run)) for name, run in groupby(pieces, key=lambda piece: piece.name)
        )
        product = self._product(matmul, epilogue)
        self._layers.append(modules)
        self._products.append(product)
        return product

    def _product(self, matmul: Matmul, epilogue: Epilogue) -> "AdaptedProduct":
        if has_triton(self._device):
            from roseinfer.adapters.cuda_matmul import adapted_on_gpu  # imports Triton, which only GPUs have
            from roseinfer.adapters.cuda_sums import AdapterSums

            self._many_sums = self._many_sums or AdapterSums(self.step, self._device)
            return adapted_on_gpu(matmul, epilogue, self.step, self._many_sums)
        bare = matmul if epilogue == NO_EPILOGUE else matmul.bare()
        return AdaptedMatmul(matmul, bare, epilogue, self.step)

    @property
    def is_idle(self) -> bool:
        return self.step.rows is None

    def begin(self, rows: AdapterRows | None) -> None:
        self.step.begin(rows)

    def _key(self, name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in self._prefixes if name.startswith(prefix)), name)

    @cached_property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shape of this process's part of each layer."""
        return tuple(
            LayerShape(layer[0].pieces[0].ins.width, tuple(module.outs for module in layer)) for layer in self._layers
        )

    def max_bytes(self, max_rank: int) -> int:
        """Return the size of the tensors of the largest file."""
        sizes = {module.name: module.pieces[0] for layer in self._layers for module in layer}
        return _MAX_ITEM_BYTES * max_rank * sum(piece.ins.whole + piece.outs.whole for piece in sizes.values())

    def attach(self, slots: DeviceSlots) -> None:
        """Set the slots of all layers, which the products read from now on."""
        for product, of_layer in zip(self._products, slots.layers, strict=True):
            product.slots = of_layer

    # --- each adapter -------------------------------------------------------------------------------------------
    def split(self, file: AdapterFile, dtype: torch.dtype, *, pinned: bool) -> HostAdapter:
        """Return this process's part of an adapter.

        Raise `UnsupportedModelError` naming a tensor that changes no layer, or does not fit its layer or `dtype`.
        """
        changes = self._matched(file)
        ranks = [
            tuple(changes[module.name].rank if module.name in changes else 0 for module in layer)
            for layer in self._layers
        ]
        made = HostAdapter.empty(self.shapes, ranks, dtype, pinned=pinned)
        for layer, host in zip(self._layers, made.layers, strict=True):
            start = 0
            for number, module in enumerate(layer):
                change = changes.get(module.name)
                if host is not None and change is not None:
                    b = host.b[start : start + module.outs, : change.rank]
                    module.fill(change, host.a[number, : change.rank], b)
                start += module.outs
        if not is_finite(made.flat):
            raise UnsupportedModelError(f"{file.folder}: numbers beyond {str(dtype).removeprefix('torch.')}")
        self._warn_of_other_base(file)
        return made

    def _warn_of_other_base(self, file: AdapterFile) -> None:
        """Log the base that the adapter names if it has another name than the model. Shapes alone decide."""
        base = file.config.base
        if base and self.model and _last_part(base) != _last_part(self.model):
            log.warning("the adapter in %s was trained on %r, and the model is %r", file.folder, base, self.model)

    def _matched(self, file: AdapterFile) -> dict[str, LowRank]:
        """Return the changes by the names of modules."""
        pieces = {module.name: module.pieces[0] for layer in self._layers for module in layer}
        found: dict[str, LowRank] = {}
        unmatched = []
        for module, change in file.changes.items():
            name = self._key(module)
            if name not in pieces:
                unmatched.append(module)
                continue
            problem = _misfit(change, pieces[name])
            if name in found:
                problem = "changes the same layer as another tensor"
            if problem is not None:
                raise UnsupportedModelError(f"{file.folder}: tensor {module}.{problem}")
            found[name] = change
        if unmatched:
            raise UnsupportedModelError(
                f"{file.folder}: the model has no linear layer that adapters may change called {some_of(unmatched)}"
            )
        return found


def _copy(source: torch.Tensor, target: torch.Tensor, scale: float | None = None) -> None:
    """Copy a matrix, multiplied in float32 if there is a scale, without other threads."""
    rows = max(1, MAX_ALONE_ELEMENTS // max(1, source.shape[1]))
    for part, into in zip(source.split(rows), target.split(rows), strict=True):
        into.copy_(part if scale is None else part.to(torch.float32) * scale)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def _misfit(change: LowRank, piece: WeightPiece) -> str | None:
    """Return why a change does not fit its layer, as the end of a message after the module's name; None if it does."""
    if change.a.shape[1] != piece.ins.whole:
        return f"lora_A.weight is {list(change.a.shape)}, but the layer has {piece.ins.whole} inputs"
    if len(change.b) != piece.outs.whole:
        return f"lora_B.weight is {list(change.b.shape)}, but the layer has {piece.outs.whole} outputs"
    return None
