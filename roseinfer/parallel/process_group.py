"""Group over gloo: for ranks on CPUs, and for the host processes of GPUs."""

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
from roseinfer.parallel.group import Product, sum_whole
from roseinfer.parallel.rendezvous import Rendezvous

# Timeouts for other ranks to join, and for them to load their model.
JOIN_TIMEOUT_S, START_TIMEOUT_S = 300.0, 1800.0
# A rank that hangs must not block the others for ever.
TIMEOUT_S = 60.0
# A wait blocks the interpreter's signal handlers, such as that of Ctrl+C, for this long.
POLL_S = 0.5
# Gloo's own timeout is off: its clock would go on while all ranks are stopped (Ctrl+Z).
_NEVER = timedelta(days=3650)
LOOPBACK = "127.0.0.1"


class ProcessGroup:
    """A `LiveGroup` over gloo.

    `timeout_s`: for the other ranks to reach the same call; the end of a rank is noticed at once. The timeout is
    counted in polls, so time during which this process is stopped, too, does not count.

    It is not registered with `torch.distributed`, as a process may have several groups, one for each model.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float | None = None) -> None:
        """Connect; returns once all ranks have joined."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        gloo: Any = dist.ProcessGroupGloo  # its stubs lack the options for the listening address
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
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._aborted = threading.Event()

    def adds_residual(self, x: torch.Tensor) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Gather the partial sums and add them in the order of the ranks, so that all ranks round alike."""
        parts = self._all(x, self.timeout_s)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total if residual is None else total.add_(residual)

    def sum_products(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return sum_whole(self, product, x, residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat(self._all(x, self.timeout_s), dim=-1, out=out)

    def minimum(self, value: int) -> int:
        return int(torch.stack(self._all(torch.tensor(value), START_TIMEOUT_S)).min())

    def _all(self, x: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        wait_for(self._gloo[0].allgather([parts], [x], self._options), self.rank, timeout_s, self._aborted)
        return parts

    def ready(self) -> None:
        self.minimum(0)

    def check(self) -> None:
        """Do nothing: every call has waited for all ranks, or has raised."""

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        """Close the connections. Waits for pending operations of other ranks."""
        self._end()


def wait_for(work: Any, rank: int, timeout_s: float, aborted: threading.Event) -> None:
    """Wait for gloo's `work` in polls. Raises `EngineDeadError` after the timeout, or soon after `aborted` is set."""
    poll = timedelta(seconds=POLL_S)
    for _ in range(max(1, math.ceil(timeout_s / POLL_S))):
        with contextlib.suppress(RuntimeError):  # the poll has ended, or the work has failed
            work.wait(poll)
        if work.is_completed():
            work.wait()
            return
        if aborted.is_set():
            raise EngineDeadError(f"rank {rank}: the wait for other ranks was aborted")
    raise EngineDeadError(f"rank {rank} timed out after waiting {timeout_s:g} s for another rank")
