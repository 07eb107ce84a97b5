"""Tensors that all layouts have, checked: scales, zeros, and the order of columns."""

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightSource
from roseinfer.quant.int4_layouts.nibbles import WORD_COLUMNS, packed_pairs, unpacked
from roseinfer.quant.int4_part import Int4Part
from roseinfer.quant.int4_weight import DEFAULT_ZERO, Int4Weight

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def groups_of(name: str, ins: Share, size: int | None) -> Share:
    """Return the groups that hold a share of a matrix's inputs.

    Raise `UnsupportedModelError` for inputs that groups or words do not divide, or a share that would cut one.
    """
    if size is not None and ins.whole % size:
        raise UnsupportedModelError(f"{name}: {ins.whole} inputs cannot be divided into groups of {size}")
    unit = size or WORD_COLUMNS
    end = ins.start + ins.width
    if ins.start % unit or end % unit:
        why = "" if ins.is_all else ", as tensor_parallel_size asks for"
        raise UnsupportedModelError(f"{name}: weights in four bits cannot be cut at inputs {ins.start} and {end}{why}")
    return Share(0, 1, 1) if size is None else Share(ins.start // size, ins.width // size, ins.whole // size)


def read_words(source: WeightSource, name: str, shard: tuple[Share, ...], *, device: torch.device) -> torch.Tensor:
    """Read a part of a tensor of int32."""
    words = torch.empty([share.width for share in shard], dtype=torch.int32, device=device)
    source.read(name, words, shard=shard)
    return words


def read_scales(source: WeightSource, name: str, shard: tuple[Share, ...]) -> torch.Tensor:
    """Read a part of a tensor of floats, in the dtype that it is stored in."""
    held = source.stored(name)
    dtype = torch.float32 if held is None else _FLOATS.get(held.dtype, torch.float32)
    scales = torch.empty([share.width for share in shard], dtype=dtype, device=source.build.device)
    source.read(name, scales, shard=shard)
    return scales


def read_order(source: WeightSource, name: str, ins: Share, size: int | None) -> torch.Tensor | None:
    """Return the input of each column, of columns that are sorted by their groups; None if inputs are in that order.

    The tensor has the group of each input. Raise `UnsupportedModelError` if the groups are not equally large, and for a
    part of inputs in another order.
    """
    if name not in source:
        return None
    whole = Share(0, ins.whole, ins.whole)
    found = read_words(source, name, (whole,), device=torch.device("cpu"))
    columns = size or ins.whole
    ascending = torch.arange(ins.whole, dtype=torch.int32) // columns
    if torch.equal(found, ascending) or bool((found == -1).all()):
        return None
    if not torch.equal(found.sort().values, ascending):
        raise UnsupportedModelError(f"tensor {name} does not put {columns} inputs into each of its groups")
    if not ins.is_all:
        why = "inputs that are grouped out of order cannot be split, as tensor_parallel_size asks for"
        raise UnsupportedModelError(f"tensor {name}: {why}")
    return found.argsort(stable=True).to(source.build.device)


def make_part(
    name: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None
) -> Int4Part:
    """Return the matrix of `codes` [N, K / 2], `scales` [N, groups], and `zeros` like these, which are codes; None: all
    are 8. `name` is of the scales. order: as from `read_order`; the columns of `codes` are not in it yet.

    Raise `UnsupportedModelError` for a scale of zero where codes differ from the zero.
    """
    if order is not None:
        codes = packed_pairs(unpacked(codes).index_select(1, order))
    weight = Int4Weight(codes.contiguous(), scales.contiguous(), None)
    void = weight.scales == 0
    if bool(void.any()):
        zero = torch.full_like(void, DEFAULT_ZERO, dtype=torch.uint8) if zeros is None else zeros
        differs = unpacked(weight.codes).unflatten(1, (-1, weight.group)) != zero[:, :, None]
        if bool((void & differs.any(2)).any()):
            raise UnsupportedModelError(f"tensor {name} holds a scale of zero for weights that are not zero")
    if zeros is None:
        return Int4Part(weight, order)
    # Exact in float32: a scale has at most 11 bits, unless it is float32 itself.
    offsets = zeros.to(torch.float32) * weight.scales.to(torch.float32)
    return Int4Part(Int4Weight(weight.codes, weight.scales, offsets.contiguous()), order)
