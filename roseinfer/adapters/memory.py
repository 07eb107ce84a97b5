"""Adapters in host memory: read from files in the background, and copied to slots of the device by plans."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

from roseinfer.adapters.adapting import Adapting
from roseinfer.adapters.config import PeftConfig
from roseinfer.adapters.reader import read_adapter
from roseinfer.adapters.slots import CpuSlotLoader, DeviceSlots, HostAdapter, SlotLoader, padded_rank
from roseinfer.core.adapters import Adapter, AdapterLoad, AdapterPool, AdapterRead
from roseinfer.core.errors import ConfigError, RoseinferError

log = logging.getLogger(__name__)

_TIMED_BYTES = 1 << 26


class AdapterMemory:
    """`AdapterFiles` of one process, and the slots of its device."""

    def __init__(
        self,
        adapting: Adapting,
        slots: DeviceSlots,
        max_rank: int,
        processes: int = 1,
        on_read: Callable[[AdapterRead], None] | None = None,
    ) -> None:
        """max_rank: as the option says. processes: that share the model. on_read: gets the results of `read` in the
        thread that reads, in place of `take_read`.
        """
        self._adapting = adapting
        self._slots = slots
        self._max_rank = max_rank
        self._processes = processes
        self._loader = _loader(slots)
        self._held: dict[str, HostAdapter] = {}
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        self._done: SimpleQueue[AdapterRead] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_read = on_read or self._done.put

    # --- files --------------------------------------------------------------------------------------------------
    def read(self, name: str, path: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_all, name="roseinfer-adapters", daemon=True)
            self._thread.start()
        self._wanted.put((name, path))

    def take_read(self) -> list[AdapterRead]:
        return [self._done.get() for _ in range(self._done.qsize())]

    def forget(self, digest: str) -> None:
        with self._lock:
            self._held.pop(digest, None)  # loads that were started have a reference of their own

    def read_now(self, name: str, path: str) -> None:
        """Read a folder for `take_read`. Raise `ConfigError` if it cannot be used."""
        result = self._read(name, path)
        if result.error is not None:
            raise ConfigError(f"lora {name!r}: {result.error}")
        self._done.put(result)

    def _read_all(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            self._on_read(self._read(*wanted))

    def _read(self, name: str, path: str) -> AdapterRead:
        start = perf_counter()
        try:
            adapter = self._hold(name, path)
        except RoseinferError as error:
            return AdapterRead(name, path, perf_counter() - start, error=str(error))
        except Exception as error:  # of whatever kind: the next folders are read, too
            log.exception("reading the adapter in %s failed", path)
            return AdapterRead(
                name, path, perf_counter() - start, error=f"{path}: {type(error).__name__}: {error}"[:500]
            )
        return AdapterRead(name, path, perf_counter() - start, adapter)

    def _hold(self, name: str, path: str) -> Adapter:
        file = read_adapter(Path(path), self._max_rank, self._adapting.max_bytes(self._max_rank))
        pinned = self._slots.device.type == "cuda"
        made = self._adapting.split(file, self._slots.dtype, pinned=pinned)
        with self._lock:
            made = self._held.setdefault(file.digest, made)
        num_bytes = made.flat.numel() * made.flat.itemsize * self._processes
        return Adapter(name, file.digest, path, file.rank, num_bytes)

    # --- plans --------------------------------------------------------------------------------------------------
    def start(self, loads: Sequence[AdapterLoad]) -> None:
        """Begin the loads of a plan."""
        for slot, digest in loads:
            with self._lock:
                adapter = self._held[digest]
            self._loader.start(slot, adapter)

    def finish(self) -> None:
        """Wait for loads that were started."""
        self._loader.finish()

    def close(self) -> None:
        """Wait for loads, and end the thread that reads files."""
        self._loader.finish()
        self._wanted.put(None)

    @property
    def device_bytes(self) -> int:
        """Memory of all slots of this process."""
        return self._slots.count * self._slots.slot_bytes

    def pool(self) -> AdapterPool:
        """Return the slots as the scheduler sees them, after a timed copy to slot 0, which must be empty."""
        slot_bytes = self._slots.slot_bytes * self._processes
        return AdapterPool(self._slots.count, self._max_rank, slot_bytes, self._timed() * self._processes)

    def _timed(self) -> float:
        """Return the bytes per second of a copy to a slot."""
        slots, taken = self._slots, 0
        ranks: list[tuple[int, ...]] = []
        for shape in slots.shapes:
            taken += shape.elements(slots.rank) * slots.dtype.itemsize
            ranks.append((slots.rank if taken <= _TIMED_BYTES or not ranks else 0,) * len(shape.outs))
        timed = HostAdapter.empty(slots.shapes, ranks, slots.dtype, pinned=slots.device.type == "cuda")
        seconds = 0.0
        for _ in range(2):  # the first run also pays for pages
            seconds = self._time_load(timed)
        self._time_load(HostAdapter(timed.flat[:0], (None,) * len(slots.shapes)))
        return timed.flat.numel() * timed.flat.itemsize / seconds

    def _time_load(self, adapter: HostAdapter) -> float:
        start = perf_counter()
        self._loader.start(0, adapter)
        self._loader.finish()
        return perf_counter() - start


def _loader(slots: DeviceSlots) -> SlotLoader:
    if slots.device.type != "cuda":
        return CpuSlotLoader(slots)
    from roseinfer.adapters.cuda_loads import CudaSlotLoader  # loads the driver's library, which only GPUs have

    return CudaSlotLoader(slots)


def max_rank_of(paths: Sequence[str]) -> int:
    """Return the largest rank that the configs of adapters name; 0 without any. Raise `ConfigError` for an unusable
    one.
    """
    try:
        return max((PeftConfig.read(Path(path)).max_rank for path in paths), default=0)
    except RoseinferError as error:
        raise ConfigError(f"lora: {error}") from error


def slots_bytes(adapting: Adapting, count: int, max_rank: int, item_bytes: int) -> int:
    """Return the memory of slots in this process."""
    return count * item_bytes * sum(shape.elements(padded_rank(max_rank)) for shape in adapting.shapes)
