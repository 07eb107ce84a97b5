"""Hand-made promises for tests of the router."""

from typing import Any

from roseinfer.core.promise import DUE_S, MAX_DEVICE_ADAPTERS_COUNT, MAX_HOST_ADAPTERS_COUNT, Promise
from roseinfer.core.step_cost import StepCost

# 10 ms a step, .1 ms a prompt token, .1 ms a decoding row, 1 us a context token.
COST = StepCost(0.010, 1e-4, 1e-4, 1e-6)


def promise(at_s: float = 10.0, *, waiting_tokens: dict[int, int] | None = None, **fields: Any) -> Promise:
    """Return the promise of an idle engine, changed by `fields`. `waiting_tokens`: by bucket."""
    waiting = tuple((waiting_tokens or {}).get(bucket, 0) for bucket in range(len(DUE_S)))
    return Promise(at_s, waiting_tokens=waiting, **{"cost": COST, "free_seats": 1000} | fields)


def with_adapters(
    device: tuple[int, ...] = (), host: tuple[int, ...] = (), at_s: float = 10.0, **fields: Any
) -> Promise:
    """Return a promise by which 100 MB are copied in 2 ms and read in 100 ms."""
    return promise(
        at_s=at_s,
        device_adapters=device + (0,) * (MAX_DEVICE_ADAPTERS_COUNT - len(device)),
        host_adapters=host + (0,) * (MAX_HOST_ADAPTERS_COUNT - len(host)),
        **{"adapter_load_s_per_byte": 2e-11, "adapter_read_s_per_byte": 1e-9, **fields},
    )
