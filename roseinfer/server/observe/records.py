"""What became of this process's requests, the last of them, and how those do that run: numbers and ids, no texts."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from heapq import merge
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from roseinfer.core.outputs import COMPLETE
from roseinfer.core.slo import Rejection, Slo, Why
from roseinfer.server.http.errors import ApiError, SloUnattainable
from roseinfer.server.request.job import (
    Account,
    Job,
    Measured,
    Outcome,
    PromptRun,
    SampleRecord,
    Visit,
    measured,
    tpot_s,
)

# Of requests that have ended, the newest that a process remembers; of those that were turned away before anything was
# known of them fewer, and apart: when the server is full they come by the thousand.
RING, TURNED_AWAY = 1024, 128
API_NAMES = {
    "text_completion": "completions",
    "chat.completion": "chat",
    "response": "responses",
    "message": "messages",
}


class Told(NamedTuple):
    """One sample, in seconds from the request's arrival; None = not yet, or nobody says.

    `scheduled_s`: when it got a seat; `first_s`, `last_s`: when its first and its newest token came; `tpot_s`: seconds
    per token after the first. `preemptions`: known when it has ended.
    """

    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    tpot_s: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    why: Why | None = None
    finish: str = ""


class Way(NamedTuple):
    """The way between several engines, see `Route`."""

    engine: int
    reason: str
    retries: int
    placed_again: int
    resumes: int


class RequestRecord(NamedTuple):
    """One request as of a moment: as it ended, or while it is `live`.

    `number`: of those that have ended in this process, from 1; 0 while it is live. `created_s`: Unix time of its
    arrival; `age_s`: from then to its end, or to now. `finish`: as of the sample that `told` is of, or what ended it
    before its time; `reason`: a word on that. `status`: of the answer over HTTP, None before there is one. `seen`: the
    worst of all samples, None before each has a token; `told`: the sample that was worst. `way`: None if there is one
    engine.
    """

    number: int
    live: bool
    id: str
    request_id: str
    api: str
    model: str
    stream: bool
    created_s: float
    age_s: float
    slo: Slo | None
    outcome: Outcome | None
    finish: str
    reason: str
    status: int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: int
    seen: Measured | None
    told: Told
    way: Way | None
    rejection: Rejection | None


class End(NamedTuple):
    """How a request ended. `cause`: what ended it before its time, None if all of it finished."""

    outcome: Outcome | None
    finish: str = ""
    reason: str = ""
    status: int = 200
    cause: BaseException | None = None


class _Live(NamedTuple):
    created_s: float
    job: Job
    account: Account
    state: Mapping[str, Any]


_NUMBER = attrgetter("number")  # the wall clock may jump


class RequestRecords:
    """Bounded: `size` requests that have ended, and those that run. `wall`: Unix time.

    Everywhere `now_s` is on the clock of the requests' arrivals.
    """

    def __init__(self, size: int = RING, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._live: dict[int, _Live] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=size)
        self._turned_away: deque[RequestRecord] = deque(maxlen=TURNED_AWAY)
        self._count = 0

    def started(self, job: Job, account: Account, state: Mapping[str, Any], now_s: float) -> None:
        self._live[id(account)] = _Live(self._wall() - (now_s - job.arrival_s), job, account, state)

    def ended(self, job: Job, account: Account, now_s: float, end: End) -> RequestRecord:
        live = self._live.pop(id(account))
        begun = live.state["status"]
        if begun and begun != end.status:  # an answer that has begun has one, whatever came of it
            end = end._replace(status=begun)
        self._count += 1
        record = _record(self._count, live.created_s, job, account, now_s, end)
        self._ended.append(record)
        return record

    def turned_away(self, visit: Visit, age_s: float, error: ApiError) -> None:
        """One that nobody has read. `age_s`: since it came."""
        self._count += 1
        record = RequestRecord(
            number=self._count,
            live=False,
            id=visit.request_id,
            request_id=visit.request_id,
            api=visit.path.split("/")[2],
            model=visit.model,
            stream=False,
            created_s=self._wall() - age_s,
            age_s=age_s,
            slo=None,
            outcome=Outcome.REJECTED,
            finish="rejected",
            reason=error.code or "",
            status=error.status,
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            choices=0,
            seen=None,
            told=Told(),
            way=None,
            rejection=None,
        )
        self._turned_away.append(record)

    def newest(self, limit: int, now_s: float, *, live: bool = True, ended: bool = True) -> list[RequestRecord]:
        """At most `limit`, those that run before those that have ended."""
        return list(islice(self._all(now_s, live, ended), limit))

    def find(self, id: str, now_s: float) -> RequestRecord | None:
        """By the answer's id or by that of the request; the newest of those that a client gave the same."""
        for live in reversed(self._live.values()):
            if id in (live.job.id, live.job.request_id):
                return self._of_live(live, now_s)
        return next((each for each in self._all(now_s, False, True) if id in (each.id, each.request_id)), None)

    def of(self, job: Job, account: Account, now_s: float, outcome: Outcome) -> RequestRecord:
        """Of a request all of whose samples have ended, while its answer has not."""
        return _record(0, job.created, job, account, now_s, End(outcome))

    def _all(self, now_s: float, live: bool, ended: bool) -> Iterator[RequestRecord]:
        if live:
            for each in reversed(self._live.values()):
                yield self._of_live(each, now_s)
        if ended:
            yield from merge(reversed(self._ended), reversed(self._turned_away), key=_NUMBER, reverse=True)

    def _of_live(self, live: _Live, now_s: float) -> RequestRecord:
        end = End(None, status=live.state["status"])
        return _record(0, live.created_s, live.job, live.account, now_s, end)


def ended_s(record: RequestRecord) -> float:
    """Unix time."""
    return record.created_s + record.age_s


def _record(number: int, created_s: float, job: Job, account: Account, now_s: float, end: End) -> RequestRecord:
    """All fields in their order: by name it would take half as long again."""
    arrival_s = job.arrival_s
    if job.num_choices == 1:
        run = account.runs[0]
        told = _told(arrival_s, run.samples[0])
        prompt, cached, output = run.prompt_tokens, run.cached_tokens, told.tokens
        seen = None if told.first_s is None else Measured(told.first_s, told.tpot_s, told.last_s or 0.0)
    else:
        run, sample = _worst(job, account)
        told = _told(arrival_s, sample)
        usage = account.usage()
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        seen = measured(account.runs)
    cause, route = end.cause, run.route
    return RequestRecord(
        number,
        not number,
        job.id,
        job.request_id,
        API_NAMES.get(job.api, job.api),
        job.model,
        job.stream is not None,
        created_s,
        now_s - arrival_s,
        job.slo,
        end.outcome,
        told.finish or end.finish,
        end.reason,
        end.status or None,
        prompt,
        cached,
        output,
        job.num_choices,
        seen,
        told,
        None if route is None else Way(route.engine, route.reason, route.retries, route.placed_again, route.resumes),
        cause.rejection if isinstance(cause, SloUnattainable) else None,
    )


def _told(arrival_s: float, sample: SampleRecord) -> Told:
    times, finish = sample.times, sample.finish_reason
    scheduled_s = first_s = last_s = None
    if times is not None and times.scheduled_s:
        scheduled_s = times.scheduled_s - times.arrival_s  # all of the engine's clock, wherever that is
    if sample.first_s:
        first_s, last_s = sample.first_s - arrival_s, sample.last_s - arrival_s
    how = "" if finish is None else finish
    return Told(scheduled_s, first_s, last_s, tpot_s(sample), sample.tokens, sample.preemptions, sample.why, how)


def _worst(job: Job, account: Account) -> tuple[PromptRun, SampleRecord]:
    """The choice that has kept its objectives least, of those that have not the one that has waited for longest."""
    if job.num_choices == 1:
        run = account.runs[0]
        return run, run.samples[0]
    pairs = ((run, sample) for run in account.runs for sample in run.samples)
    return max(pairs, key=lambda pair: _badness(job.slo, *pair))


def _badness(slo: Slo | None, run: PromptRun, sample: SampleRecord) -> tuple[bool, float, float]:
    """Whether it did not complete, the largest share of an objective that it took, and when its first token came."""
    incomplete = sample.finish_reason is not None and sample.finish_reason not in COMPLETE
    if not sample.first_s:
        return incomplete, inf, inf
    ttft_s = sample.first_s - run.arrival_s
    if slo is None:
        return incomplete, 0.0, ttft_s
    pairs = ((ttft_s, slo.ttft_s), (tpot_s(sample), slo.tpot_s), (sample.last_s - run.arrival_s, slo.e2e_s))
    return incomplete, max((seen / promised for seen, promised in pairs if promised is not None), default=0.0), ttft_s
