"""Slots of the device, and the LoRA adapters that use each of them: one alone, or several in turn.

A request whose adapter is not in its slot sits out steps, and keeps its seat and K/V. It is still in time if steps are
several times as fast as the tightest TPOT objective: `sharers_limit` says how many adapters may share a slot. Without
TPOT objectives none do, because turns cost throughput.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from roseinfer.core.request import Request

MIN_TURN_STEPS = 8
MAX_SHARERS_COUNT = 4
USABLE_TURN_SHARE = 0.5  # of the time, for rows; the rest is for changes of turns and for longer steps


@dataclass(slots=True, eq=False)
class Sharer:
    """Adapter that has a slot, and the seated requests that use it by id, ended ones in flight included.

    `since_s`: when it got the slot. `left`: number of plans before it last gave way to another one. `draining`: no
    further request takes it. `used`: number of its last use; a greater one is later. `busy_since_s`: when a request
    took it that no other used. `tried_s`: when it was last loaded for waiting requests, if none has started since.
    """

    digest: str
    slot: "Slot"
    since_s: float
    left: int
    users: dict[str, Request] = field(default_factory=dict)
    draining: bool = False
    used: int = 0
    busy_since_s: float = 0.0
    tried_s: float = -inf


@dataclass(slots=True, eq=False)
class Slot:
    """Slot of the device. `current`: the sharer in it, also while a step in flight copies it there (`loading`).

    `closing`: no row uses it until the next sharer is loaded. `since`: number of plans before its last load was done.
    """

    number: int
    sharers: list[Sharer] = field(default_factory=list)
    current: Sharer | None = None
    loading: bool = False
    closing: bool = False
    since: int = 0

    def serves(self, sharer: Sharer) -> bool:
        """True if rows of the next plan may use this sharer."""
        return self.current is sharer and not self.loading and not self.closing

    @property
    def absent(self) -> list[Sharer]:
        """Sharers that are not in the slot."""
        return [sharer for sharer in self.sharers if sharer is not self.current]

    @property
    def is_used(self) -> bool:
        """True if seated requests use one of its sharers."""
        return any(sharer.users for sharer in self.sharers)

    @property
    def in_flight(self) -> bool:
        """True if submitted steps have rows that use it."""
        return self.current is not None and any(request.in_flight for request in self.current.users.values())


def sharers_limit(requests: Iterable[Request], step_s: float) -> int:
    """Return how many adapters may share a slot so that these requests keep their pace with steps of `step_s`."""
    paces_s = [request.slo.tpot_s for request in requests if request.slo is not None and request.slo.tpot_s]
    if not paces_s or not step_s:
        return 1
    return max(1, min(MAX_SHARERS_COUNT, int(USABLE_TURN_SHARE * min(paces_s) / step_s)))


def sitting_out(slots: Sequence[Slot]) -> set[Request]:
    """Return the seated requests whose adapter rows of the next plan cannot use."""
    absent = [sharer for slot in slots for sharer in slot.sharers if not slot.serves(sharer)]
    return {request for sharer in absent for request in sharer.users.values()}
