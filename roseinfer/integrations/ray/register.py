"""Contents of the directory of a deployment: its engines, and counts of their requests."""

from typing import NamedTuple

from roseinfer.core.clock import Clock

# An engine registers every `REGISTER_INTERVAL_S` seconds. After `EXPIRY_S` without that, it is removed.
REGISTER_INTERVAL_S, EXPIRY_S = 2.0, 15.0
# A restarted directory first waits for the numbers that are taken, before it gives new ones.
SETTLE_S = 3 * REGISTER_INTERVAL_S


class RegisteredEngine(NamedTuple):
    """Entry of one engine.

    `number`: the same for all clients. `address`: host and port. `name`: unique, and in its certificate, so that
    clients never take the next engine at an address for the previous one. `retiring`: it gets no more requests.
    """

    number: int
    address: str
    name: str
    retiring: bool = False


class EngineRegistry:
    """Engines that have registered within `EXPIRY_S`. `version` changes whenever `engines` does.

    `first_version`: must differ from all versions of an earlier registry, which clients may still follow. `restarted`:
    there was an earlier registry, so engines may still report the numbers that it gave them.
    """

    def __init__(self, clock: Clock, first_version: int = 0, restarted: bool = False) -> None:
        self._clock = clock
        self._entries: dict[str, tuple[RegisteredEngine, float]] = {}
        self._next = 0
        self._numbers_from_s = clock.now() + (SETTLE_S if restarted else 0.0)
        self.version = first_version

    def engines(self) -> list[RegisteredEngine]:
        return sorted(engine for engine, _ in self._entries.values())

    def register(self, address: str, name: str, number: int | None, retiring: bool) -> int | None:
        """Add or refresh an engine. Return its number: the one that it has, or the next that no engine has had.

        Return None while engines may still report their numbers; the engine must ask again. Remove the previous engine
        at the address.
        """
        now_s = self._clock.now()
        known = self._entries.get(name)
        if number is None and known is not None:
            number = known[0].number
        if number is None:
            if now_s < self._numbers_from_s:
                return None
            number = self._next
        self.reserve(number)
        for other in [other for other in self.engines() if other.address == address and other.name != name]:
            self.remove(other.name)
        engine = RegisteredEngine(number, address, name, retiring)
        self._entries[name] = engine, now_s
        if known is None or known[0] != engine:
            self.version += 1
        return number

    def reserve(self, number: int) -> None:
        """Never give this number to another engine. Its own engine may be unreachable or gone."""
        self._next = max(self._next, number + 1)

    def remove(self, name: str) -> None:
        """Remove an engine that has ended."""
        if self._entries.pop(name, None) is not None:
            self.version += 1

    def expire(self) -> list[RegisteredEngine]:
        """Remove and return the engines that have not registered for `EXPIRY_S`."""
        before_s = self._clock.now() - EXPIRY_S
        expired = [engine for engine, registered_s in self._entries.values() if registered_s < before_s]
        for engine in expired:
            self.remove(engine.name)
        return expired


class RequestCounts(NamedTuple):
    """Counts of requests with objectives.

    `rejected`: rejected, though an idle engine would have met the objectives. `met`: finished with all objectives met.
    """

    with_objectives: float = 0.0
    rejected: float = 0.0
    met: float = 0.0


class RequestTotals:
    """Sum of the counters of all API processes."""

    def __init__(self) -> None:
        self._counted: dict[str, RequestCounts] = {}
        self.total = RequestCounts()

    def report(self, process: str, counted: RequestCounts) -> None:
        """Add what a process has counted since its last report. `counted`: its counts since its start.

        Its first report adds nothing, because the previous directory may have added these counts.
        """
        before = self._counted.get(process, counted)
        self._counted[process] = counted
        self.total = RequestCounts(
            *(ever + now - then for ever, now, then in zip(self.total, counted, before, strict=True))
        )
