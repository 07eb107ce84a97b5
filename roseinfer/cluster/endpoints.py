"""The places of all engines that a process sends requests to, which come and go, and what is true of all of them."""

from collections.abc import Iterator

from roseinfer.cluster.endpoint import MIN_WAIT_S, Endpoint
from roseinfer.core.clock import Clock
from roseinfer.core.errors import EngineDeadError, EngineUnavailableError, RoseinferError
from roseinfer.core.outputs import SchedulerStats, carry_counters, sum_stats
from roseinfer.engine.api import EngineHealth, EngineInfo, EngineReport
from roseinfer.engine.live import LiveRequest


class Endpoints:
    """In the order in which they came. A number is given once: what is heard or counted of an engine that is gone can
    never be taken for another's.
    """

    def __init__(self, clock: Clock) -> None:
        self._endpoints: dict[int, Endpoint] = {}
        self._used: set[int] = set()
        self._past_stats = SchedulerStats()  # what those have counted that are gone
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
        """One for an engine that comes: the wanted one unless that has been given before, else the next."""
        if wanted is None or wanted in self._used:
            wanted = max(self._used, default=-1) + 1
        self._used.add(wanted)
        return wanted

    def add(self, endpoint: Endpoint) -> None:
        self._endpoints[endpoint.number] = endpoint

    def drop(self, endpoint: Endpoint) -> None:
        """It is gone for good. What it has counted stays counted."""
        del self._endpoints[endpoint.number]
        self._past_stats = carry_counters(
            self._past_stats, endpoint.stats()._replace(running=0, waiting=0, blocks_used=0, blocks_total=0)
        )
        self._empty_since_s = self._clock.now()

    # --- of all of them -----------------------------------------------------------------------------------------
    def health(self) -> EngineHealth:
        """That of the liveliest engine."""
        nobody = EngineHealth(False, self._clock.now() - self._empty_since_s, "there is no engine")
        return min([endpoint.health() for endpoint in self], key=_weakness, default=nobody)

    def stats(self) -> SchedulerStats:
        """The sum over all engines, those that are gone too."""
        now = sum_stats([endpoint.stats() for endpoint in self]) if self._endpoints else SchedulerStats()
        return now if self._past_stats == _NOTHING else carry_counters(self._past_stats, now)

    def reports(self) -> list[EngineReport]:
        """As of the last `look` of each."""
        return [endpoint.report() for endpoint in self]


_NOTHING = SchedulerStats()


def _weakness(health: EngineHealth) -> tuple[bool, bool, float]:
    return not health.alive, health.final, health.heartbeat_age_s


# Attributes of `EngineInfo` that engines share if one can continue requests of another.
_SHARED = ("kv_cache", "block_size", "prefix_caching")
_SHARED_FACTS = ("model_type", "vocab_size", "eos_token_ids", "dtype", "weights")


def incompatibility(ours: EngineInfo, info: EngineInfo) -> str | None:
    """Return why an engine cannot continue requests of the others, of which `ours` is the first; None if it can.

    The folder of the same model may differ between hosts, so only the last part of its name counts.
    """
    pairs = [("model", _last_part(ours.model), _last_part(info.model))]
    pairs += [(name, getattr(ours.facts, name), getattr(info.facts, name)) for name in _SHARED_FACTS]
    pairs += [(name, getattr(ours, name), getattr(info, name)) for name in _SHARED]
    for name, wanted, found in pairs:
        if wanted != found:
            return f"its {name} is {found}, that of the others {wanted}"
    if info.facts.max_model_len < ours.facts.max_model_len:
        return f"its max_model_len is {info.facts.max_model_len}, that of the others {ours.facts.max_model_len}"
    return None


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def unavailable_error(endpoints: Endpoints) -> EngineUnavailableError:
    """None of them takes requests."""
    wait_s = min([endpoint.expected_wait_s() for endpoint in endpoints], default=MIN_WAIT_S)
    return EngineUnavailableError("no engine takes requests just now", wait_s)


def lost_request_error(
    live: LiveRequest, endpoints: Endpoints, reason: str, *, on_purpose: bool = False
) -> RoseinferError:
    """What ends a request whose engine was lost for this reason, with no other to go to. `on_purpose`: the engine was
    to be restarted.
    """
    return EngineDeadError(reason) if live.has_output and not on_purpose else unavailable_error(endpoints)
