"""Requests that wait for a full engine while another one has room or a short queue."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from roseinfer.router.base import MAX_TRUSTED_SHARE, Placement, RoutingRequest
from roseinfer.router.placer import Placer
from roseinfer.router.view import EngineView

MIN_WAIT_S = 1.0  # a younger request stays where it is
MIN_QUEUE_RATIO = 2  # of the present engine's queue to another one's, which may be of a slower engine
MAX_MOVES_COUNT = 32  # of one engine at a time, which bounds the time of a call

Name = TypeVar("Name")


class Unanswered(NamedTuple, Generic[Name]):
    """Request without output. `movable`: it has no objectives and has not moved yet."""

    name: Name
    arrival_s: float
    samples: int
    movable: bool


def overdue_moves(
    placer: Placer,
    engine: int,
    sent: Callable[[], Iterable[Unanswered[Name]]],
    ask: Callable[[Name], RoutingRequest | None],
    now_s: float,
) -> Iterator[tuple[Name, Placement]]:
    """Place requests again that wait too long for `engine`, the oldest first. The caller moves each before the next.

    `sent`: returns the requests that this process has sent there and that have no output. `ask`: returns the question
    for one of them, None if it has ended or left meanwhile.

    Requests with objectives stay. Policies delay those that have time, and on another engine they would slow down its
    requests: in simulations fewer objectives were met. The forecast of the other engine must not exceed the time that
    the request has waited: a prefix in the cache of the present engine may be worth a wait.
    """
    here = placer.views[engine]
    others = [view for view in placer.views.values() if view is not here and view.promise and view.accepts_requests]
    if not here.own_waiting or not any(_has_room(view) or _has_short_queue(view, here) for view in others):
        return

    def takes(view: EngineView, request: RoutingRequest, waited_s: float) -> bool:
        forecast = placer.forecast(view.engine, request, now_s)
        if forecast.ttft_s > waited_s:
            return False
        return forecast.utilisation <= MAX_TRUSTED_SHARE or _has_short_queue(view, here)

    waiting = (one for one in _waiting(sent(), here.own_waiting) if one.movable and now_s - one.arrival_s >= MIN_WAIT_S)
    for one in islice(waiting, MAX_MOVES_COUNT):
        request = ask(one.name)
        if request is None:
            continue
        better = [view.engine for view in others if takes(view, request, now_s - one.arrival_s)]
        excluded = [number for number in placer.views if number not in better]
        placement = placer.place(request, now_s, excluded) if better else None
        if placement is not None:
            yield one.name, placement


def _has_room(view: EngineView) -> bool:
    return view.utilisation <= MAX_TRUSTED_SHARE


def _has_short_queue(view: EngineView, here: EngineView) -> bool:
    return MIN_QUEUE_RATIO * view.load[0] < here.load[0]


def _waiting(sent: Iterable[Unanswered[Name]], samples: int) -> list[Unanswered[Name]]:
    """Return the newest requests with that many samples, the oldest first.

    Engines start requests roughly in order, so the newest wait while the prompts of the others are computed.
    """
    by_age, found = sorted(sent, key=lambda one: one.arrival_s), []
    while by_age and samples > 0:
        found.append(by_age.pop())
        samples -= found[-1].samples
    return found[::-1]
