"""Contents of the directory of a deployment: its engines, and how their requests fared."""

from typing import NamedTuple

from roseinfer.core.clock import Clock

# An engine that has told nothing for so long is not there any more: it tells every `TELL_S` seconds.
TELL_S, EXPIRE_S = 2.0, 15.0
# A directory that was started again waits so long for the numbers that are taken, before it gives new ones.
SETTLE_S = 3 * TELL_S


class RegisteredEngine(NamedTuple):
    """`number`: the same for all clients. `address`: host and port. `name`: in its certificate, and of no other engine.
    So clients never take the next engine at an address for the previous one. `retiring`: it gets no more requests.
    """

    number: int
    address: str
    name: str
    retiring: bool = False


class Register:
    """The engines that have told of themselves lately. `version` changes whenever `engines` does.

    `first_version`: not that of an earlier register that somebody may still follow. `anew`: there was one, so engines
    may yet bring the numbers that it gave them.
    """

    def __init__(self, clock: Clock, first_version: int = 0, anew: bool = False) -> None:
        self._clock = clock
        self._entries: dict[str, tuple[RegisteredEngine, float]] = {}
        self._next = 0
        self._numbers_from_s = clock.now() + (SETTLE_S if anew else 0.0)
        self.version = first_version

    def engines(self) -> list[RegisteredEngine]:
        return sorted(engine for engine, _ in self._entries.values())

    def tell(self, address: str, name: str, number: int | None, retiring: bool) -> int | None:
        """Register an engine. Return its number: the one that it has, or the next that no engine has had.

        Return None if it must ask again later, because engines may yet report numbers. The previous engine at the
        address is removed.
        """
        now_s = self._clock.now()
        known = self._entries.get(name)
        if number is None and known is not None:
            number = known[0].number
        if number is None:
            if now_s < self._numbers_from_s:
                return None
            number = self._next
        self.known(number)
        for other in [other for other in self.engines() if other.address == address and other.name != name]:
            self.gone(other.name)
        engine = RegisteredEngine(number, address, name, retiring)
        self._entries[name] = engine, now_s
        if known is None or known[0] != engine:
            self.version += 1
        return number

    def known(self, number: int) -> None:
        """Reserve a number that a process has seen, even if its engine is silent or gone."""
        self._next = max(self._next, number + 1)

    def gone(self, name: str) -> None:
        """Remove an engine that has ended."""
        if self._entries.pop(name, None) is not None:
            self.version += 1

    def expire(self) -> list[RegisteredEngine]:
        """Remove the engines that have not registered for `EXPIRE_S`, and return them."""
        before_s = self._clock.now() - EXPIRE_S
        silent = [engine for engine, told_s in self._entries.values() if told_s < before_s]
        for engine in silent:
            self.gone(engine.name)
        return silent


class Fared(NamedTuple):
    """Requests with objectives: how many there were, how many of them were refused that an idle engine would have kept,
    and how many finished with all objectives met.
    """

    promised: float = 0.0
    refused: float = 0.0
    met: float = 0.0


class Attainment:
    """Sum of the counters of all API processes since each began."""

    def __init__(self) -> None:
        self._counted: dict[str, Fared] = {}
        self.total = Fared()

    def report(self, process: str, counted: Fared) -> None:
        """`counted` by that process, ever. What it had counted when it was first heard of, another attainment has."""
        before = self._counted.get(process, counted)
        self._counted[process] = counted
        self.total = Fared(*(ever + now - then for ever, now, then in zip(self.total, counted, before, strict=True)))
