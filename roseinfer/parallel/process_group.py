"""A group over `torch.distributed`: gloo on a CPU."""

from datetime import timedelta

import torch
import torch.distributed as dist

# A rank that died must not leave the others waiting for ever.
TIMEOUT_S = 60.0


class ProcessGroup:
    """See `Group`. `address`: where rank 0 listens and the others find it, as "tcp://127.0.0.1:PORT"."""

    def __init__(self, address: str, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        self.rank = rank
        self.size = size

    def adds(self, x: torch.Tensor) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Partial sums are gathered and added in the order of the ranks, so every rank rounds alike."""
        parts = self._all(x)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total if residual is None else total.add_(residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat(self._all(x), dim=-1, out=out)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return parts

    def close(self) -> None:
        dist.destroy_process_group()
