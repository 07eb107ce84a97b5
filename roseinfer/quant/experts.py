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

    def __init__(self, router: torch.Tensor, experts: Sequence[tuple[Matmul, Matmul]], shape: ExpertShape) -> None:
        """router: [count, hidden] float32. experts: for each expert, gate and up with their epilogue, and down."""
        self._router = router
        self._experts = experts
        self._shape = shape

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        h = norm(x)
        ids, weights = route(h, self._router, self._shape.top_k, renormalise=self._shape.renormalise)
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


def route(h: torch.Tensor, router: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts and their weights: [T, top_k] int64 and float32, the largest weight first.

    h: [T, hidden], after the norm. router: [count, hidden] float32. See `Experts` for the formula.
    """
    probabilities = F.linear(h.to(torch.float32), router).softmax(-1)
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
    gated = Epilogue(shape.activation, gated=True)
    gate_up, down = expert_pieces(shape, share, names)
    experts = [
        (
            weights.load(source, gate_up[2 * number : 2 * number + 2], gated),
            weights.load(source, [down[number]], NO_EPILOGUE),
        )
        for number in range(shape.count)
    ]
    return SequentialExperts(router, experts, shape)


def expert_pieces(shape: ExpertShape, share: Share, names: ExpertNames) -> tuple[list[WeightPiece], list[WeightPiece]]:
    """List the matrices of a layer's experts in the order of their numbers: gate and up of each, and down of each.

    share: this process's part of each expert's width. Stacked, the first list is [count * 2 * share.width, hidden], the
    second [count * hidden, share.width].
    """
    hidden = Share(0, shape.hidden, shape.hidden)
    numbers = range(shape.count)
    gate_up = [WeightPiece(name.format(number), share, hidden) for number in numbers for name in (names.gate, names.up)]
    return gate_up, [WeightPiece(names.down.format(number), hidden, share) for number in numbers]


def read_router(source: WeightSource, shape: ExpertShape, names: ExpertNames, dtype: torch.dtype) -> torch.Tensor:
    """Read the router's matrix [count, hidden] in `dtype`, a float type."""
    return read_new(source, f"{names.router}.weight", shape.count, shape.hidden, dtype=dtype)
