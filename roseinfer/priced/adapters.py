"""LoRA adapters of a machine without a model: their sizes, and how long reads and copies take."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType

from roseinfer.core.adapters import Adapter, AdapterPool, AdapterRead
from roseinfer.core.clock import Clock
from roseinfer.core.config.adapters import DEFAULT_MAX_RANK_COUNT, AdapterConfig

DEFAULT_RANK_BYTES = 5_456_000  # all layers of an 8B model, in 16 bits
NOT_NAMED: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AdapterMachine:
    """Slots and memory for adapters that all have `num_bytes` bytes and the rank `max_rank`."""

    num_slots: int = 8
    max_rank: int = 16
    num_bytes: int = 16 * DEFAULT_RANK_BYTES
    load_bytes_per_s: float = 50e9
    read_bytes_per_s: float = 1e9
    host_bytes: int = 4 * 2**30

    @classmethod
    def of(cls, config: AdapterConfig) -> "AdapterMachine | None":
        """Return the memory for adapters that the options describe; None without adapters."""
        if not config.enabled:
            return None
        rank = config.lora_max_rank or DEFAULT_MAX_RANK_COUNT
        return cls(config.slots, rank, rank * DEFAULT_RANK_BYTES)

    @property
    def pool(self) -> AdapterPool:
        return AdapterPool(self.num_slots, self.max_rank, self.num_bytes, self.load_bytes_per_s)

    @property
    def load_s(self) -> float:
        """Return the seconds of a copy to a slot."""
        return self.num_bytes / self.load_bytes_per_s

    def adapter(self, name: str, path: str) -> Adapter:
        """Return the adapter that a folder holds: its content is its path."""
        return Adapter(name, sha256(path.encode()).hexdigest(), path, self.max_rank, self.num_bytes)


class PricedAdapterFiles:
    """Reader of adapters that exist in prices only. One read after the other takes the machine's time."""

    def __init__(self, machine: AdapterMachine, clock: Clock, named: Mapping[str, str] = NOT_NAMED) -> None:
        """`named`: paths of adapters by name, which are read already."""
        self._machine, self._clock = machine, clock
        self._pending: list[tuple[float, AdapterRead]] = []  # end of each read, rising
        for name, path in named.items():
            self._pending.append((0.0, AdapterRead(name, path, 0.0, machine.adapter(name, path))))

    def read(self, name: str, path: str) -> None:
        seconds = self._machine.num_bytes / self._machine.read_bytes_per_s
        begin_s = max([self._clock.now(), *[end_s for end_s, _ in self._pending[-1:]]])
        read = AdapterRead(name, path, seconds, self._machine.adapter(name, path))
        self._pending.append((begin_s + seconds, read))

    def take_read(self) -> list[AdapterRead]:
        now_s = self._clock.now()
        done = [read for end_s, read in self._pending if end_s <= now_s]
        self._pending = self._pending[len(done) :]
        return done

    def forget(self, digest: str) -> None:
        """Do nothing: there is no copy."""
