"""A group over gloo: the processes of a CPU, and what those of GPUs tell each other through their hosts."""

import contextlib
import math
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from roseinfer.core.errors import EngineDeadError
from roseinfer.parallel.forks import keep_in_forks
from roseinfer.parallel.rendezvous import Rendezvous

# For others to come, which are about to, and for them to be as far as this one, which have a model to load first.
JOIN_TIMEOUT_S, START_PATIENCE_S = 300.0, 1800.0
# A rank that hangs must not leave the others waiting for ever, where nobody notices it.
PATIENCE_S = 60.0
# How long a wait keeps the interpreter from taking signals, such as the one of Ctrl+C.
LOOK_S = 0.5
# Gloo's own limit is on a clock that goes on while all ranks are stopped (Ctrl+Z), so it is none.
_NEVER = timedelta(days=3650)
LOOPBACK = "127.0.0.1"


class ProcessGroup:
    """See `Group`. `patience_s`: for the others to reach the same call, in which their end is noticed at once. It is
    counted in looks: whatever stops this process too, for how long it may be, is no fault of the others.

    It is none of `torch.distributed`'s own groups: a process may have several, one for each model.
    """

    def __init__(self, rendezvous: Rendezvous, patience_s: float = PATIENCE_S) -> None:
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
        keep_in_forks(self._gloo[0])
        self._end = weakref.finalize(self, self._gloo.clear)
        self._options = AllgatherOptions()
        self._options.timeout = _NEVER
        self.patience_s = patience_s
        self._aborted = threading.Event()

    def adds_residual(self, x: torch.Tensor) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Partial sums are gathered and added in the order of the ranks, so every rank rounds alike."""
        parts = self._all(x, self.patience_s)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total if residual is None else total.add_(residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat(self._all(x, self.patience_s), dim=-1, out=out)

    def minimum(self, value: int) -> int:
        return int(torch.stack(self._all(torch.tensor(value), START_PATIENCE_S)).min())

    def _all(self, x: torch.Tensor, patience_s: float) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._gloo[0].allgather([parts], [x], self._options), patience_s)
        return parts

    def _wait(self, work: Any, patience_s: float) -> None:
        look = timedelta(seconds=LOOK_S)
        for _ in range(max(1, math.ceil(patience_s / LOOK_S))):
            with contextlib.suppress(RuntimeError):  # the look is over, or the work has failed
                work.wait(look)
            if work.is_completed():
                work.wait()
                return
            if self._aborted.is_set():
                raise EngineDeadError(f"rank {self.rank} gives up waiting for the others")
        raise EngineDeadError(f"rank {self.rank} has waited {patience_s:g} s in vain for another rank")

    def ready(self) -> None:
        self.minimum(0)

    def check(self) -> None:
        """Every call has waited for all ranks, or has raised."""

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        """Waits for what another rank has yet to do, until that ends."""
        self._end()
