"""Weights of a GGUF file, converted to floats while they are read, or kept in four bits.

Quantised tensors are computed with as floats, except for matrices that a GPU keeps in four bits. The `gguf` package,
from the format's authors, decodes them. A few rows at a time are converted directly into the model's memory, so no
other memory is needed.
"""

import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.progress import report
from roseinfer.gguf.files import open_gguf
from roseinfer.gguf.reader import TensorInfo, printable
from roseinfer.gguf.rope import CONFIG_TENSORS
from roseinfer.models.gguf_names import GgufNames, StoredTensor
from roseinfer.models.spec import ModelSpec
from roseinfer.parallel.group import Share
from roseinfer.quant.base import Build, TensorMetadata, WeightPiece
from roseinfer.quant.finite import FiniteCheck
from roseinfer.quant.int4_layouts.gguf import read_blocks
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_scheme import GGUF_ENCODINGS, GGUF_GROUP_COLUMNS

# Numbers converted at once: the intermediate results of `gguf` then fit in a core's cache.
CHUNK_VALUE_COUNT = 2**18
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPONENTS = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.float16: (np.uint16, 0x7C00),
    torch.bfloat16: (np.uint16, 0x7F80),
}


class GgufWeights:
    """Implementation of `Int4Reader`. Tensors have the names and the shapes of the model's own checkpoints.

    The file is mapped, and a tensor is read when requested. All matrices are stored as [out, in], so `transposed` has
    no effect.
    """

    def __init__(self, path: Path, spec: ModelSpec, build: Build) -> None:
        """Raise `UnsupportedModelError` and `ModelNotFoundError` as `open_gguf` does."""
        self.build = build
        self.finite = FiniteCheck()
        self._path = path
        file = open_gguf(path)
        self._names = GgufNames(spec, file.metadata.get("general.architecture"))
        self._experts = 0 if spec.experts is None else spec.experts.count
        self._tensors = file.tensors
        self._read: set[str] = set()
        self._maps: dict[Path, mmap.mmap] = {}
        self._open = ExitStack()

    def __enter__(self) -> "GgufWeights":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._maps.clear()
        self._open.close()

    def __contains__(self, name: str) -> bool:
        place = self._names.of(name)
        return place is not None and place.name in self._tensors

    def stored(self, name: str) -> TensorMetadata | None:
        place = self._names.of(name)
        if place is None or place.name not in self._tensors:
            return None
        info = self._tensors[place.name]
        return TensorMetadata(info.encoding.name, info.shape if place.part is None else info.shape[1:])

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        stored, part = self._find(name)
        report("reading weights", len(self._read), len(self._tensors))
        info = self._tensors[stored]
        parts = list(shard) if shard is not None else [Share(0, width, width) for width in into.shape]
        assert tuple(part.width for part in parts) == tuple(into.shape), f"{name}: {parts} into {list(into.shape)}"
        if into.ndim == 3:  # a convolution of single channels, whose middle dimension files leave out
            into, parts = into[:, 0], [parts[0], parts[2]]
        elif len(info.shape) == 1 < into.ndim and parts[0].whole == 1:  # a matrix of one row, stored as a vector
            into, parts = into[0], parts[1:]
        self._check_shape(stored, part, parts)
        if not into.is_floating_point() or into.element_size() < 2:
            raise UnsupportedModelError(f"{self._path}: tensor {stored} has type {info.encoding.name}")
        if into.ndim == 1:
            self._read_vector(stored, part or 0, into, parts[0])
        else:
            self._read_matrix(stored, part or 0, into, *parts)
        self.finite.add_widened(stored, into)

    def _read_vector(self, stored: str, row: int, into: torch.Tensor, share: Share) -> None:
        """Read one row of a tensor, which may be in any order."""
        whole = self._widened(stored, self._tensors[stored], [row]).view(-1)
        order = self._names.row_order(stored)
        whole = whole if order is None else whole[torch.from_numpy(order)]
        if self._names.is_decay(stored):
            whole = self._logarithms(stored, whole)
        if offset := self._names.offset(stored):
            whole = whole.to(torch.float32) - offset
        into.copy_(whole[share.start : share.start + share.width])

    def _read_matrix(self, stored: str, part: int, into: torch.Tensor, rows: Share, columns: Share) -> None:
        """Read a share of one of a tensor's matrices, a few rows at a time."""
        info, order = self._tensors[stored], self._names.row_order(stored)
        wanted_columns = self._names.column_order(stored)
        column_order = None if wanted_columns is None else torch.from_numpy(wanted_columns)
        first = part * rows.whole + rows.start
        rows_of_chunk = max(1, CHUNK_VALUE_COUNT // info.shape[-1])
        for start in range(0, rows.width, rows_of_chunk):
            stop = min(rows.width, start + rows_of_chunk)
            chosen = slice(first + start, first + stop)
            chunk = self._widened(stored, info, chosen if order is None else order[chosen])
            if column_order is not None:
                chunk = chunk[:, column_order]
            into[start:stop].copy_(chunk[:, columns.start : columns.start + columns.width])

    def keeps_int4(self, pieces: Sequence[WeightPiece]) -> bool:
        kinds = {self._kept_encoding(piece) for piece in pieces}
        return len(kinds) == 1 and None not in kinds

    def _kept_encoding(self, piece: WeightPiece) -> str | None:
        """Return the type of a matrix of which this piece can be read in four bits; None for all others."""
        place = self._names.of(f"{piece.name}.weight")
        info = None if place is None else self._tensors.get(place.name)
        if place is None or info is None or self._names.column_order(place.name) is not None:
            return None
        cuts = (piece.ins.start | piece.ins.width) % GGUF_GROUP_COLUMNS
        return info.encoding.name if info.encoding.name in GGUF_ENCODINGS and not cuts else None

    def read_int4(self, piece: WeightPiece) -> Int4Part:
        stored, part = self._find(f"{piece.name}.weight")
        report("reading weights", len(self._read), len(self._tensors))
        info, rows, columns = self._tensors[stored], piece.outs, piece.ins
        self._check_shape(stored, part, (rows, columns))
        before = (part or 0) * rows.whole + rows.start
        chosen, order = slice(before, before + rows.width), self._names.row_order(stored)
        raw = self._raw(info, chosen if order is None else order[chosen])
        weight = read_blocks(info.encoding.name, torch.from_numpy(raw).to(self.build.device))
        offsets = weight.scales if weight.offsets is None else weight.offsets
        if not bool((weight.scales.isfinite() & offsets.isfinite()).all()):
            self._refuse_damaged(stored)
        return Int4Part(weight.columns(columns.start, columns.width))

    def order_of(self, name: str) -> torch.Tensor | None:
        return None  # files have all columns in the order of inputs

    def _check_shape(self, stored: str, part: int | None, shares: Sequence[Share]) -> None:
        wanted = [share.whole for share in shares]
        shape = wanted if part is None else [self._experts, *wanted]
        found = list(self._tensors[stored].shape)
        if found != shape:
            raise UnsupportedModelError(f"{self._path}: tensor {stored} is {found}, the metadata say {shape}")

    def _logarithms(self, stored: str, whole: torch.Tensor) -> torch.Tensor:
        """Return x of -e^x. Raise `UnsupportedModelError` for a number that is not negative."""
        if not bool((whole < 0).all()):
            raise UnsupportedModelError(f"{self._path}: tensor {stored} holds a number that is not negative")
        return whole.float().neg().log()

    def skip(self, name: str) -> None:
        self._find(name)

    def refuse_unread(self) -> None:
        """Raise `UnsupportedModelError` if the file holds tensors that the model has not requested."""
        unread = self._tensors.keys() - self._read - CONFIG_TENSORS
        unexpected = sorted(name for name in unread if not self._names.is_left_out(name))
        if unexpected:
            more = f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else ""
            names = ", ".join(map(printable, unexpected[:5]))
            raise UnsupportedModelError(f"{self._path}: unexpected tensor {names}{more}")

    def _find(self, name: str) -> StoredTensor:
        place = self._names.of(name)
        if place is None or place.name not in self._tensors:
            raise UnsupportedModelError(f"{self._path}: tensor {place.name if place else name} is missing")
        self._read.add(place.name)
        return place

    def _widened(self, stored: str, info: TensorInfo, rows: "slice | Sequence[int] | np.ndarray") -> torch.Tensor:
        """Return some rows of a tensor [.., in] as floats. Raise `UnsupportedModelError` for NaN and infinity."""
        values = widen(info.encoding.name, self._raw(info, rows))
        if values is None:
            self._refuse_damaged(stored)
        return values

    def _raw(self, info: TensorInfo, rows: "slice | Sequence[int] | np.ndarray") -> np.ndarray:
        """Return the bytes of some rows of a tensor [.., in]."""
        raw = np.frombuffer(self._map(info.path), np.uint8, info.nbytes, info.start)
        chosen: np.ndarray = np.ascontiguousarray(raw.reshape(prod(info.shape[:-1]), -1)[rows]).copy()
        return chosen

    def _refuse_damaged(self, stored: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._path}: tensor {stored} holds NaN or infinity: the file is damaged")

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            file = self._open.enter_context(path.open("rb"))
            self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[path]


def widen(encoding: str, raw: np.ndarray) -> torch.Tensor | None:
    """Convert bytes [n, bytes of a row] to floats [n, numbers of a row]; None if one is NaN or infinite."""
    plain = _PLAIN.get(encoding)
    floats = _widen_blocks(encoding, raw) if plain is None else raw
    dtype = plain or torch.float32
    # An exponent of all ones is infinity or NaN. NumPy checks so few numbers faster than torch's threads do.
    bits, exponent = _EXPONENTS[dtype]
    if ((floats.view(bits) & exponent) == exponent).any():
        return None
    return torch.from_numpy(floats).view(dtype)


def _widen_blocks(encoding: str, raw: np.ndarray) -> np.ndarray:
    from gguf import quants  # files without quantised tensors do not need it

    kind = getattr(quants, encoding)
    blocks = raw.reshape(-1, kind.type_size)
    if encoding == "MXFP4" and (blocks[:, 0] == 255).any():  # a scale that stands for NaN
        return np.full((raw.shape[0], 1), np.nan, np.float32)
    with np.errstate(all="ignore"):  # damaged scales are reported by the caller
        widened: np.ndarray = kind.dequantize_blocks(blocks)
    return widened.astype(np.float32, copy=False).reshape(raw.shape[0], -1)
