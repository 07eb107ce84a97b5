"""Weight sources of tensors that a test holds, and groups that are only imagined."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.parallel.group import Product, RankGroup, Share, SingleRank, sum_whole
from roseinfer.quant.base import Build, TensorMetadata, WeightFormat
from roseinfer.quant.finite import FiniteCheck
from roseinfer.quant.plain import PlainFormat

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64"}
BUILD = Build(torch.float32, torch.device("cpu"), SingleRank(), PlainFormat())


class Named:
    """A weight source of the tensors it is given, that knows which were asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor], build: Build = BUILD) -> None:
        self.build = build
        self.finite = FiniteCheck()
        self.tensors = tensors
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def stored(self, name: str) -> TensorMetadata | None:
        if name not in self.tensors:
            return None
        tensor = self.tensors[name]
        return TensorMetadata(DTYPES[tensor.dtype], tuple(tensor.shape))

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        self.skip(name)
        tensor = self.tensors[name].T if transposed else self.tensors[name]
        for dim, part in enumerate(shard or ()):
            assert tensor.shape[dim] == part.whole
            tensor = tensor.narrow(dim, part.start, part.width)
        assert tensor.shape == into.shape
        into.copy_(tensor)

    def skip(self, name: str) -> None:
        if name not in self.tensors:
            raise UnsupportedModelError(f"tensor {name} is missing")
        self.asked.add(name)


@dataclass(frozen=True)
class Imagined:
    """One rank of a group whose other ranks a test runs itself: what it would send stays as it is.

    adding: the sum of all ranks adds a residual, of which this one's part has its share.
    """

    rank: int
    size: int
    adding: bool = False

    def adds_residual(self, x: torch.Tensor) -> bool:
        return self.adding

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        assert residual is None or self.adding
        return x if residual is None else x + residual / self.size

    def sum_products(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return sum_whole(self, product, x, residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x


def build_for(group: RankGroup, weight_format: WeightFormat | None = None) -> Build:
    return replace(BUILD, group=group, weight_format=weight_format or PlainFormat())
