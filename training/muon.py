"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): orthogonalised momentum."""

from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


@torch.compile(dynamic=False)
def orthogonalise(matrices: Tensor) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix to each of [n, rows, columns], rows <= columns, in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised in one batch.

    Updates are scaled to the size of AdamW's (0.2 per element, Liu et al. 2025, https://arxiv.org/abs/2502.16982),
    so both optimizers take the same learning rates.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([{"params": group} for group in by_shape.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params, momentum, lr = group["params"], group["momentum"], group["lr"]
            grads = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            if not state:
                state["buffer"] = torch.zeros_like(grads)
            state["buffer"].lerp_(grads, 1 - momentum)
            update = grads.lerp(state["buffer"], momentum)
            tall = update.shape[-2] > update.shape[-1]
            update = orthogonalise(update.mT if tall else update)
            update = (update.mT if tall else update) * (0.2 * max(update.shape[-2:]) ** 0.5)
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, list(update.to(grads.dtype).unbind()), alpha=-lr)
