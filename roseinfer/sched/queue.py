"""The queue of waiting requests, in which the samples of one request wait as one entry."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from roseinfer.core.request import Request


class WaitingQueue:
    """Waiting requests in the order in which they start if nobody decides otherwise.

    The n samples of a request are a family: one entry, which stands where its first sample joined. An entry's *lead*
    is sample 0 as long as that waits, because the others wait for it to compute the prompt; then the first of the
    others. One that was preempted comes back at the head, and its family with it.

    `awaits_parent(request)`: whether a sample other than 0 has to wait for sample 0 to compute the prompt.
    """

    def __init__(self, awaits_parent: Callable[[Request], bool]) -> None:
        self._awaits_parent = awaits_parent
        self._requests: dict[str, Request] = {}
        self._leads: OrderedDict[str, Request] = OrderedDict()  # by the id of the family's sample 0
        self._families: dict[str, dict[str, Request]] = {}  # the members of entries that have several

    def __len__(self) -> int:
        """Requests, not entries."""
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """All requests, by when they joined."""
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """A new request joins at the end, or its family if that waits."""
        self._requests[request.request_id] = request
        family = _family_of(request)
        lead = self._leads.get(family)
        if lead is None:
            self._leads[family] = request
            return
        self._families.setdefault(family, {lead.request_id: lead})[request.request_id] = request
        if request.fork_of is None:
            self._leads[family] = request

    def add_first(self, request: Request) -> None:
        """A request that was preempted comes back: it goes before all others, also those of its family."""
        self._requests[request.request_id] = request
        family = _family_of(request)
        lead = self._leads.get(family)
        if lead is not None:
            others = self._families.get(family, {lead.request_id: lead})
            self._families[family] = {request.request_id: request, **others}
        if lead is None or lead.request_id != family:
            self._leads[family] = request
        self._leads.move_to_end(family, last=False)

    def discard(self, request: Request) -> None:
        """The request waits no longer, if it did."""
        if self._requests.pop(request.request_id, None) is None:
            return
        family = _family_of(request)
        members = self._families.get(family)
        if members is None:
            del self._leads[family]
            return
        del members[request.request_id]
        if self._leads[family] is request:
            self._leads[family] = members.get(family) or next(iter(members.values()))
        if len(members) == 1:
            del self._families[family]

    def ready(self) -> list[Request]:
        """The leads of the entries that could start now, in order."""
        blocked = self._awaits_parent
        return [
            lead for lead in self._leads.values() if lead.seat is None and (lead.fork_of is None or not blocked(lead))
        ]

    def first_ready(self) -> Request | None:
        return next((lead for lead in self._leads.values() if self.can_start(lead)), None)

    def can_start(self, request: Request) -> bool:
        """Whether it waits, no submitted step names it any more, and it need not wait for its sample 0."""
        return request in self and request.seat is None and not self._awaits_parent(request)

    def leads(self, request: Request) -> bool:
        """Whether the request stands for its entry, and could start."""
        return self._leads.get(_family_of(request)) is request and self.can_start(request)

    def members(self, lead: Request) -> Sequence[Request]:
        """The lead and those of its entry that could start with it, the lead first."""
        others = self._families.get(_family_of(lead))
        if others is None or lead.fork_of is None:
            return (lead,)
        return (lead, *(other for other in others.values() if other is not lead and self.can_start(other)))

    def family(self, request: Request) -> list[Request]:
        """All that wait as one entry with the request, itself included, whether they could start or not."""
        return list(self._families.get(_family_of(request), {request.request_id: request}).values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless every request is in exactly one entry, which knows its lead."""
        grouped: dict[str, list[Request]] = {}
        for request in self._requests.values():
            grouped.setdefault(_family_of(request), []).append(request)
        assert grouped.keys() == self._leads.keys(), "entries and waiting requests disagree"
        for family, members in grouped.items():
            lead = self._leads[family]
            assert lead in members, "a lead is of its family"
            assert lead.fork_of is None or all(m.fork_of is not None for m in members), "sample 0 leads"
            known = self._families.get(family)
            assert (known is None) == (len(members) == 1), "one member makes no family"
            assert known is None or sorted(known) == sorted(m.request_id for m in members)


def _family_of(request: Request) -> str:
    return request.fork_of or request.request_id
