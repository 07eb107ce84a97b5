"""A group over gloo: the processes of a CPU, and what those of GPUs tell each other through their hosts."""

import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from roseinfer.core.errors import EngineDeadError
from roseinfer.parallel.rendezvous import Rendezvous

# For others to come, which are about to, and for them to be as far as this one, which have a model to load first.
JOIN_TIMEOUT_S, START_TIMEOUT_S = 300.0, 1800.0
# A rank that died must not leave the others waiting for ever, where nobody notices its end.
TIMEOUT_S = 60.0
# How long a wait keeps the interpreter from taking signals, such as the one of Ctrl+C.
LOOK_S = 0.5
LOOPBACK = "127.0.0.1"


class ProcessGroup:
    """See `Group`. `timeout_s`: for the others to reach the same call, in which their end is noticed at once.

    It is none of `torch.distributed`'s own groups: a process may have several, one for each model.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float = TIMEOUT_S) -> None:
        """Returns once all have come."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        gloo: Any = dist.ProcessGroupGloo  # whose stubs lack what says where it listens
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        self._store = rendezvous.store
        store = dist.PrefixStore("hosts", rendezvous.store)
        # Its threads must have ended before the interpreter does, or the process aborts.
        self._gloo = [gloo(store, self.rank, self.size, options)]
        self._end = weakref.finalize(self, self._gloo.clear)
        self._start, self._step = AllgatherOptions(), AllgatherOptions()
        self._start.timeout = timedelta(seconds=START_TIMEOUT_S)
        self._step.timeout = timedelta(seconds=timeout_s)
        self._aborted = threading.Event()

    def adds(self, x: torch.Tensor) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Partial sums are gathered and added in the order of the ranks, so every rank rounds alike."""
        parts = self._all(x, self._step)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total if residual is None else total.add_(residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat(self._all(x, self._step), dim=-1, out=out)

    def least(self, value: int) -> int:
        return int(torch.stack(self._all(torch.tensor(value), self._start)).min())

    def _all(self, x: torch.Tensor, options: AllgatherOptions) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._gloo[0].allgather([parts], [x], options))
        return parts

    def _wait(self, work: Any) -> None:
        look = timedelta(seconds=LOOK_S)
        while True:
            try:
                work.wait(look)
                return
            except RuntimeError:  # the look is over, or the work has failed
                if work.is_completed():
                    work.wait()
                    return
            if self._aborted.is_set():
                raise EngineDeadError(f"rank {self.rank} gives up waiting for the others")

    def ready(self) -> None:
        self.least(0)

    def check(self) -> None:
        """Every call has waited for all ranks, or has raised."""

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._end()
