"""Queues of a scheduler: waiting requests, where the samples of one request form one entry, and times to live."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from roseinfer.core.request import Request, Status


class WaitingQueue:
    """Waiting requests in their default starting order.

    The n samples of a request are a family: one entry, at the position where its first sample joined. The *lead* of an
    entry is sample 0 while that waits, because the others need its prompt, and then the first of the others. A request
    that was preempted or is resumed (`Request.resumed`) joins before all others, together with its family. So of
    several that join in one step the last one starts first; a router sends resumed requests in reverse for this reason.

    `awaits_parent(request)`: True if a sample other than 0 has to wait until sample 0 has computed the prompt.
    """

    def __init__(self, awaits_parent: Callable[[Request], bool]) -> None:
        self._awaits_parent = awaits_parent
        self._requests: dict[str, Request] = {}
        # Leads by the id of the family's sample 0: entries in order of arrival, and entries with a member that has run
        # or is resumed, the newest last. Plain dicts: an `OrderedDict` of 1,000 takes ten times as long to list.
        self._arrived: dict[str, Request] = {}
        self._returned: dict[str, Request] = {}
        self._families: dict[str, dict[str, Request]] = {}  # members of entries that have several
        # Entries whose lead may be unable to start. They are few, so `ready` does not have to check every lead.
        self._maybe_blocked: set[str] = set()

    def __len__(self) -> int:
        """Count requests, not entries."""
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests in the order in which they joined."""
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Add a new request at the end, or to its family if that waits."""
        self._requests[request.request_id] = request
        family = request.fork_of or request.request_id
        lead = self._arrived.get(family) or self._returned.get(family)
        if lead is None and request.fork_of is None and request.seat is None:  # the common case: an entry of its own
            self._arrived[family] = request
            return
        if lead is not None:
            self._families.setdefault(family, {lead.request_id: lead})[request.request_id] = request
        if lead is None or request.fork_of is None:
            self._set_lead(family, request)

    def add_first(self, request: Request) -> None:
        """Add a preempted or resumed request before all others and before its family."""
        self._requests[request.request_id] = request
        family = _family_of(request)
        lead = self._lead(family)
        if lead is not None:
            others = self._families.get(family, {lead.request_id: lead})
            self._families[family] = {request.request_id: request, **others}
        self._arrived.pop(family, None)
        self._returned.pop(family, None)
        self._returned[family] = request
        self._set_lead(family, request if lead is None or lead.fork_of is not None else lead)

    def discard(self, request: Request) -> None:
        """Remove a request if it is here."""
        if self._requests.pop(request.request_id, None) is None:
            return
        family = _family_of(request)
        members = self._families.get(family)
        if members is None:
            self._arrived.pop(family, None)
            self._returned.pop(family, None)
            self._maybe_blocked.discard(family)
            return
        del members[request.request_id]
        if self._lead(family) is request:
            self._set_lead(family, members.get(family) or next(iter(members.values())))
        if len(members) == 1:
            del self._families[family]

    def recheck(self, request: Request) -> None:
        """Check again whether a request can start, because its `loading` has changed."""
        if request in self and self._lead(_family_of(request)) is request:
            self._set_lead(_family_of(request), request)

    def _lead(self, family: str) -> Request | None:
        return self._arrived.get(family) or self._returned.get(family)

    def _set_lead(self, family: str, lead: Request) -> None:
        """Set the lead of an entry, which keeps its position; a new entry joins at the end."""
        (self._returned if family in self._returned else self._arrived)[family] = lead
        if lead.seat is not None or lead.fork_of is not None or lead.loading:
            self._maybe_blocked.add(family)
        else:
            self._maybe_blocked.discard(family)

    def ready(self) -> list[Request]:
        """Return the leads of the entries that could start now, in order."""
        leads = [*reversed(self._returned.values()), *self._arrived.values()]
        blocked = {self._lead(family) for family in self._maybe_blocked}
        blocked = {lead for lead in blocked if lead is not None and not self.can_start(lead)}
        return [lead for lead in leads if lead not in blocked] if blocked else leads

    def first_ready(self) -> Request | None:
        return next(iter(self.ready()), None)

    def can_start(self, request: Request) -> bool:
        """True if a request waits, and waits neither for submitted steps that name it, nor a load, nor sample 0."""
        free = request.seat is None and not request.loading
        return request in self and free and not self._awaits_parent(request)

    def leads(self, request: Request) -> bool:
        """True if the request is the lead of its entry and could start."""
        family = request.fork_of or request.request_id
        lead = self._arrived.get(family) or self._returned.get(family)
        if lead is not request or request.seat is not None or request.loading:
            return False
        return request.fork_of is None or self.can_start(request)

    def members(self, lead: Request) -> Sequence[Request]:
        """Return the lead, and then the members of its entry that could start with it."""
        if lead.fork_of is None:  # sample 0, for which the others wait
            return (lead,)
        others = self._families.get(lead.fork_of)
        if others is None:
            return (lead,)
        return (lead, *(other for other in others.values() if other is not lead and self.can_start(other)))

    def has_family(self, family: str) -> bool:
        """True if a sample of the request whose sample 0 has the id `family` waits."""
        return self._lead(family) is not None

    def family(self, request: Request) -> list[Request]:
        """Return all members of the request's entry, including itself, whether they could start or not."""
        return list(self._families.get(_family_of(request), {request.request_id: request}).values())

    def siblings(self, first: Request) -> list[Request]:
        """Return the waiting samples that share the prompt of `first`, which is sample 0 and may run."""
        if not self._families and not self._maybe_blocked:  # the common case: no shared prompts
            return []
        members = self._families.get(first.request_id)
        if members is not None:
            return [member for member in members.values() if member is not first]
        lead = self._lead(first.request_id)
        return [] if lead is None or lead is first else [lead]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every request is in exactly one entry with the right lead."""
        grouped: dict[str, list[Request]] = {}
        for request in self._requests.values():
            grouped.setdefault(_family_of(request), []).append(request)
        assert not self._arrived.keys() & self._returned.keys(), "an entry stands in two places"
        assert grouped.keys() == self._arrived.keys() | self._returned.keys(), "entries and waiting requests disagree"
        assert self._maybe_blocked <= grouped.keys(), "an entry is gone"
        for family, members in grouped.items():
            lead = self._lead(family)
            assert lead is not None and lead in members, "a lead is of its family"
            blocked = lead.seat is not None or lead.fork_of is not None or lead.loading
            assert family in self._maybe_blocked or not blocked, "it could be blocked"
            assert lead.fork_of is None or all(m.fork_of is not None for m in members), "sample 0 leads"
            known = self._families.get(family)
            assert (known is None) == (len(members) == 1), "one member makes no family"
            assert known is None or sorted(known) == sorted(m.request_id for m in members)


def _family_of(request: Request) -> str:
    return request.fork_of or request.request_id


class Expiries:
    """Deadlines of the live requests (`requests`, by id) that have a time to live."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Add a request if it has a deadline."""
        if request.deadline_s is None:
            return
        heappush(self._heap, (request.deadline_s, request.request_id))
        # Most requests end long before their deadline, and their ids must not stay here until then.
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapify(self._heap)

    def due(self, now_s: float) -> Iterable[Request]:
        """Return the live requests whose deadline has passed, each once."""
        return self._take(now_s) if self._heap and self._heap[0][0] <= now_s else ()

    def _take(self, now_s: float) -> Iterator[Request]:
        while self._heap and self._heap[0][0] <= now_s:
            request = self._requests.get(heappop(self._heap)[1])
            if request is None or request.status is Status.FINISHED or request.deadline_s is None:
                continue
            if request.deadline_s <= now_s:  # else the id is in use by a newer request
                yield request
