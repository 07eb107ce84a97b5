"""Endpoints of all engines that a process sends requests to, and their sums."""

from collections.abc import Iterator

from roseinfer.cluster.endpoint import MIN_WAIT_S, Endpoint
from roseinfer.core.clock import Clock
from roseinfer.core.errors import EngineDeadError, EngineUnavailableError, RoseinferError
from roseinfer.core.outputs import SchedulerStats, carry_counters, sum_stats
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport
from roseinfer.engine.live import LiveRequest

# Lower bound on the wait that clients are told. With their two retries they then wait longer than most starts take.
MIN_ADVICE_S = 3.0


class Endpoints:
    """Endpoints in the order in which they were added. Each number is used once, so late messages and counts of a
    removed engine cannot be mistaken for another's.
    """

    def __init__(self, clock: Clock) -> None:
        self._endpoints: dict[int, Endpoint] = {}
        self._used: set[int] = set()
        self._past_stats = SchedulerStats()  # counts of removed engines
        self._clock = clock
        self._empty_since_s = clock.now()

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    def __getitem__(self, number: int) -> Endpoint:
        return self._endpoints[number]

    def __contains__(self, number: int) -> bool:
        return number in self._endpoints

    def __len__(self) -> int:
        return len(self._endpoints)

    def number(self, wanted: int | None = None) -> int:
        """Return a number for a new engine: `wanted` unless it was used before, otherwise the next free one."""
        if wanted is None or wanted in self._used:
            wanted = max(self._used, default=-1) + 1
        self._used.add(wanted)
        return wanted

    def add(self, endpoint: Endpoint) -> None:
        self._endpoints[endpoint.number] = endpoint

    def drop(self, endpoint: Endpoint) -> None:
        """Remove an endpoint for good. Its counts stay in the sums."""
        del self._endpoints[endpoint.number]
        self._past_stats = carry_counters(
            self._past_stats, endpoint.stats()._replace(running=0, waiting=0, blocks_used=0, blocks_total=0)
        )
        self._empty_since_s = self._clock.now()

    # --- sums -----------------------------------------------------------------------------------------------------
    def health(self) -> EngineHealth:
        """Return the health of the healthiest engine."""
        none = EngineHealth(False, self._clock.now() - self._empty_since_s, "no engine is known")
        return min([endpoint.health() for endpoint in self], key=_weakness, default=none)

    def stats(self) -> SchedulerStats:
        """Return the sum over all engines, including removed ones."""
        now = sum_stats([endpoint.stats() for endpoint in self]) if self._endpoints else SchedulerStats()
        return now if self._past_stats == _NOTHING else carry_counters(self._past_stats, now)

    def reports(self) -> list[EngineReport]:
        """Return the state of each as of its last `refresh`."""
        return [endpoint.report() for endpoint in self]


_NOTHING = SchedulerStats()


def _weakness(health: EngineHealth) -> tuple[bool, bool, float]:
    return not health.alive, health.final, health.heartbeat_age_s


# Facts that engines share if one can continue requests of another.
_SHARED = ("model_type", "vocab_size", "eos_token_ids", "dtype", "weights", "block_size", "prefix_caching")


def incompatibility(ours: EngineInfo, info: EngineInfo) -> str | None:
    """Return why an engine cannot continue requests of the others, or None. `ours`: the first of the others.

    The folder of the same model may differ between hosts, so only the last part of its name counts.
    """
    pairs = [("model", _last_part(ours.model), _last_part(info.model))]
    pairs += [(name, getattr(ours.facts, name), getattr(info.facts, name)) for name in _SHARED]
    pairs.append(("kv_cache", ours.kv_cache, info.kv_cache))
    for name, wanted, found in pairs:
        if wanted != found:
            return f"its {name} is {found}, but the other engines have {wanted}"
    if (ours.facts.adapters is None) != (info.facts.adapters is None):
        return f"it serves {'no ' if info.facts.adapters is None else ''}LoRA adapters, unlike the other engines"
    found_len, wanted_len = info.facts.max_model_len, ours.facts.max_model_len
    if found_len < wanted_len:
        return f"its max_model_len {found_len} is below that of the other engines ({wanted_len})"
    return None


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def expected_wait_s(endpoints: Endpoints) -> float:
    """Return the seconds until an engine is expected to accept requests, when none does."""
    return min([endpoint.expected_wait_s() for endpoint in endpoints], default=MIN_WAIT_S)


def unavailable_error(endpoints: Endpoints) -> EngineUnavailableError:
    """Return the error for a request when no engine accepts requests."""
    retry_s = max(MIN_ADVICE_S, expected_wait_s(endpoints))
    return EngineUnavailableError("no engine accepts requests at the moment", retry_s)


def lost_request_error(
    live: LiveRequest, endpoints: Endpoints, reason: str, *, on_purpose: bool = False
) -> RoseinferError:
    """Return the error that ends a request after its engine was lost and no other can take it. `on_purpose`: the engine
    was lost by a planned restart.
    """
    unavailable = unavailable_error(endpoints)
    return EngineDeadError(reason, unavailable.retry_s) if live.has_output and not on_purpose else unavailable
