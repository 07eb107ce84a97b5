"""LoRA adapters in a simulation: options, and requests that name adapters at random."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from roseinfer.core.config.adapters import DEFAULT_SLOTS_COUNT
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError
from roseinfer.priced.adapters import DEFAULT_RANK_BYTES, AdapterMachine
from roseinfer.sim.workload import Arrival, zipf_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAdapterConfig:
    """Options of adapters, and of the memory for them."""

    adapters: int = option(0, "LoRA adapters that requests name; 0 = none")
    adapter_zipf: float = option(1.0, "the k-th adapter is named with a probability proportional to 1 / k^ZIPF")
    adapter_share: float = option(1.0, "share of the requests that name an adapter")
    lora_slots: int = option(DEFAULT_SLOTS_COUNT, "adapters that run at once")
    lora_bytes: int = option(16 * DEFAULT_RANK_BYTES, "bytes of an adapter; default: rank 16 of an 8B model in 16 bits")
    lora_load_rate: float = option(50.0, "GB per second copied from host memory to a slot")
    lora_read_rate: float = option(1.0, "GB per second read from disk to host memory")
    lora_host_size: float = option(4.0, "GiB of host memory per engine for adapters outside of slots", metavar="GIB")

    def __post_init__(self) -> None:
        check_positive(self, "lora_slots", "lora_bytes", "lora_load_rate", "lora_read_rate", "lora_host_size")
        if self.adapters < 0:
            raise ConfigError(f"adapters must not be negative, got {self.adapters}")
        if not (isfinite(self.adapter_zipf) and self.adapter_zipf >= 0):
            raise ConfigError(f"adapter_zipf must not be negative, got {self.adapter_zipf}")
        if not 0 < self.adapter_share <= 1:
            raise ConfigError(f"adapter_share must be above 0 and at most 1, got {self.adapter_share}")

    @property
    def machine(self) -> AdapterMachine | None:
        """Return the memory for adapters; None without any."""
        if not self.adapters:
            return None
        return AdapterMachine(
            num_slots=self.lora_slots,
            num_bytes=self.lora_bytes,
            load_bytes_per_s=self.lora_load_rate * 1e9,
            read_bytes_per_s=self.lora_read_rate * 1e9,
            host_bytes=int(self.lora_host_size * 2**30),
        )

    def name(self, arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
        """Return the same requests with adapters."""
        machine, rng = self.machine, random.Random(f"adapters {seed}")
        if machine is None:
            return list(arrivals)
        weights = zipf_weights(self.adapters, self.adapter_zipf)
        known = [machine.adapter(f"adapter-{rank}", f"/adapters/{rank}") for rank in range(1, self.adapters + 1)]
        found = []
        for arrival in arrivals:
            chosen = rng.choices(known, cum_weights=weights)[0]
            found.append(replace(arrival, adapter=chosen if rng.random() < self.adapter_share else None))
        return found


@dataclass(frozen=True, slots=True)
class ArrivalsWithAdapters:
    """Function of a seed that lets the requests of another one name adapters; it can be pickled."""

    arrivals: Callable[[int], Sequence[Arrival]]
    lora: SimulatedAdapterConfig

    def __call__(self, seed: int) -> Sequence[Arrival]:
        return self.lora.name(self.arrivals(seed), seed)
