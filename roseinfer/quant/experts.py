"""Experts as a sequence of products, for CPUs, and how the experts of any format are read.

Each expert multiplies all rows of the tokens that chose it at once.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from roseinfer.core.errors import ConfigError
from roseinfer.parallel.group import Share
from roseinfer.quant.base import (
    NO_EPILOGUE,
    Epilogue,
    ExpertNames,
    ExpertShape,
    Matmul,
    Norm,
    WeightFormat,
    WeightPiece,
    WeightSource,
    read_new,
)


class SequentialExperts:
    """`Experts` for a CPU. The host reads which experts have rows, so no graph can capture it."""

    def __init__(
        self,
        router: torch.Tensor,
        experts: Sequence[tuple[Matmul, Matmul]],
        shape: ExpertShape,
        router_bias: torch.Tensor | None = None,
    ) -> None:
        """router: [count, hidden], router_bias: [count], both float32. experts: for each expert, gate and up with their
        epilogue, and down. None is shared.
        """
        assert not shape.shared
        self._router = router
        self._router_bias = router_bias
        self._experts = experts
        self._shape = shape

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        h, shape = norm(x), self._shape
        ids, weights = route(h, self._router, shape.top_k, renormalise=shape.renormalise, bias=self._router_bias)
        # Sorted by expert, then by token.
        numbers = ids.flatten()
        order = numbers.argsort(stable=True)
        tokens = order // self._shape.top_k
        factors = weights.flatten()[order, None]
        rows = torch.bincount(numbers, minlength=self._shape.count).tolist()
        # Experts are added in the order of their numbers, so that a row's result does not depend on the other rows.
        total = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
        start = 0
        for (gate_up, down), count in zip(self._experts, rows, strict=True):
            if count == 0:
                continue
            chosen = slice(start, start + count)
            result = down(gate_up(h[tokens[chosen]]))
            total.index_add_(0, tokens[chosen], result.to(torch.float32) * factors[chosen])
            start = chosen.stop
        result = total.to(x.dtype)
        return result if residual is None else residual + result


def route(
    h: torch.Tensor, router: torch.Tensor, top_k: int, *, renormalise: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts and their weights: [T, top_k] int64 and float32, the largest weight first.

    h: [T, hidden], after the norm. router: [count, hidden] float32. bias: [count] float32. See `Experts` for the
    formula.
    """
    probabilities = F.linear(h.to(torch.float32), router, bias).softmax(-1)
    # Not `topk`, whose choice among equal values is undefined.
    weights, ids = probabilities.sort(stable=True, dim=-1, descending=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return ids, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def load_sequential_experts(
    weights: WeightFormat, source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames
) -> SequentialExperts:
    """Load every expert as two linear layers of the format `weights`. share: this process's part of their width.

    Raises like `WeightFormat.load`, and `ConfigError` on other devices than a CPU.
    """
    if source.build.device.type != "cpu":
        raise ConfigError("models with experts run on a CPU, or on a GPU with Triton")
    router = read_router(source, shape, names, torch.float32)
    router_bias = read_router_bias(source, shape, names)
    gated = Epilogue(shape.activation, gated=True)
    gate_up, down = expert_pieces(source, shape, share, names)
    experts = [
        (
            weights.load(source, gate_up[2 * number : 2 * number + 2], gated),
            weights.load(source, [down[number]], NO_EPILOGUE),
        )
        for number in range(shape.count)
    ]
    return SequentialExperts(router, experts, shape, router_bias)


def expert_pieces(
    source: WeightSource, shape: ExpertShape, share: Share, names: ExpertNames
) -> tuple[list[WeightPiece], list[WeightPiece]]:
    """List the matrices of a layer's experts in the order of their numbers: gate and up of each, and down of each.

    share: this process's part of each expert's width. Stacked, the first list is [matrices * 2 * share.width, hidden],
    the second [matrices * hidden, share.width]. Biases of down, which all ranks' results share, are the first rank's.
    """
    hidden, adds = Share(0, shape.hidden, shape.hidden), shape.bias and source.build.group.rank == 0
    numbers = range(shape.count)
    ups = [name.format(number) for number in numbers for name in (names.gate, names.up)]
    downs = [names.down.format(number) for number in numbers]
    if shape.shared:
        assert names.shared is not None, "the family names no shared expert"
        ups += [names.shared.gate, names.shared.up]
        downs.append(names.shared.down)
    if shape.bias and not adds:
        for name in downs:
            source.skip(f"{name}.bias")
    gate_up = [WeightPiece(name, share, hidden, bias=shape.bias) for name in ups]
    return gate_up, [WeightPiece(name, hidden, share, bias=adds) for name in downs]


def read_router(source: WeightSource, shape: ExpertShape, names: ExpertNames, dtype: torch.dtype) -> torch.Tensor:
    """Read the router's matrix [matrices, hidden] in `dtype`, a float type."""
    router = torch.empty(shape.matrices, shape.hidden, dtype=dtype, device=source.build.device)
    source.read(f"{names.router}.weight", router[: shape.count])
    if shape.shared:
        assert names.shared is not None, "the family names no shared expert"
        source.read(f"{names.shared.factor}.weight", router[shape.count :])
    return router


def read_router_bias(source: WeightSource, shape: ExpertShape, names: ExpertNames) -> torch.Tensor | None:
    """Read the router's bias [count] float32; None without one."""
    return read_new(source, f"{names.router}.bias", shape.count, dtype=torch.float32) if shape.bias else None
