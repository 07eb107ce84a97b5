"""Records of this process's running and recently ended requests: numbers and ids, no texts."""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from heapq import merge
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from roseinfer.core.outputs import COMPLETE, DraftTally
from roseinfer.core.slo import Rejection, Slo, Why
from roseinfer.engine.api import Route
from roseinfer.server.http.errors import ApiError, SloUnattainable
from roseinfer.server.request.job import (
    Job,
    JobProgress,
    Latencies,
    Outcome,
    PromptRun,
    RequestEnd,
    SampleRecord,
    UnreadRequest,
    tpot_s,
    worst_latencies,
)

# Requests rejected before their body was read have a list of their own: a full server rejects thousands of them.
MAX_ENDED_RECORDS, MAX_REJECTED_RECORDS = 1024, 128


class SampleSummary(NamedTuple):
    """Times of one sample in seconds from the request's arrival; None = not yet, or unknown.

    `scheduled_s`: first seat; `first_s`, `last_s`: first and newest token; `tpot_s`: seconds per token after the first.
    `preemptions` is known once the sample has ended. `first_why`: the report up to its first token, see `SampleRecord`.
    `drafts`: by proposer; None = there were none.
    """

    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    tpot_s: float = 0.0
    tokens: int = 0
    preemptions: int = 0
    why: Why | None = None
    finish: str = ""
    first_why: Why | None = None
    drafts: Mapping[str, DraftTally] | None = None


class RequestEntry(NamedTuple):
    """State of one request when it ended, or now if it is `live`.

    `number`: counts ended requests of this process from 1; 0 while live.
    `created_s`: Unix time of arrival; `age_s`: seconds from arrival to the end, or to now.
    `worst`: the sample that kept its objectives least. `finish`: its finish reason, or what ended the request early.
    `reason`: details of an early end. `status`: HTTP status, None before the answer begins.
    `seen`: worst latencies of all samples, None until each has a token. `engine`: the last one, None if it had none.
    `route`: a copy, None with a single engine.
    """

    number: int
    live: bool
    id: str
    request_id: str
    api: str
    model: str
    created_s: float
    age_s: float
    outcome: Outcome | None
    finish: str
    reason: str
    status: int | None
    stream: bool = False
    slo: Slo | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    choices: int = 0
    seen: Latencies | None = None
    worst: SampleSummary = SampleSummary()
    route: Route | None = None
    rejection: Rejection | None = None
    engine: int | None = None


class _Live(NamedTuple):
    created_s: float
    job: Job
    progress: JobProgress
    state: Mapping[str, Any]
    first_engine: int


_NUMBER = attrgetter("number")  # the wall clock may jump


class RequestRecords:
    """All running requests and the last `size` that ended. `wall`: returns Unix time.

    `now_s` is always on the clock of the requests' arrivals.
    """

    def __init__(self, size: int = MAX_ENDED_RECORDS, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._live: dict[int, _Live] = {}
        self._ended: deque[RequestEntry] = deque(maxlen=size)
        self._turned_away: deque[RequestEntry] = deque(maxlen=MAX_REJECTED_RECORDS)
        self._count = 0

    def started(
        self, job: Job, progress: JobProgress, state: Mapping[str, Any], now_s: float, first_engine: int = 0
    ) -> None:
        """Add a running request. `first_engine`: number of the first engine of its model."""
        self._live[id(progress)] = _Live(self._wall() - (now_s - job.arrival_s), job, progress, state, first_engine)

    def ended(self, progress: JobProgress, now_s: float, end: RequestEnd) -> RequestEntry:
        live = self._live.pop(id(progress))
        begun = live.state["status"]
        if begun and begun != end.status:  # the client has already received this status
            end = end._replace(status=begun)
        self._count += 1
        record = _record(self._count, live, now_s, end)
        self._ended.append(record)
        return record

    def rejected_unread(self, visit: UnreadRequest, age_s: float, error: ApiError) -> None:
        """Record a request that was rejected before its body was read. `age_s`: seconds since its arrival."""
        self._count += 1
        record = RequestEntry(
            number=self._count,
            live=False,
            id=visit.request_id,
            request_id=visit.request_id,
            api=_api_of(visit.path),
            model=visit.model,
            created_s=self._wall() - age_s,
            age_s=age_s,
            outcome=Outcome.REJECTED,
            finish="rejected",
            reason=error.code or "",
            status=error.status,
        )
        self._turned_away.append(record)

    def newest(self, limit: int, now_s: float, *, live: bool = True, ended: bool = True) -> list[RequestEntry]:
        """Return at most `limit` records: running requests first, then ended ones, newest first."""
        return list(islice(self._all(now_s, live, ended), limit))

    def find(self, id: str, now_s: float) -> RequestEntry | None:
        """Return the newest record whose answer or request has this id."""
        for live in reversed(self._live.values()):
            if id in (live.job.id, live.job.request_id):
                return self._of_live(live, now_s)
        return next((each for each in self._all(now_s, False, True) if id in (each.id, each.request_id)), None)

    def of(self, job: Job, progress: JobProgress, now_s: float, outcome: Outcome) -> RequestEntry:
        """Return the record of a request whose samples have ended and whose answer is still being sent."""
        return _record(0, _Live(job.created, job, progress, {}, 0), now_s, RequestEnd(outcome))

    def _all(self, now_s: float, live: bool, ended: bool) -> Iterator[RequestEntry]:
        if live:
            for each in reversed(self._live.values()):
                yield self._of_live(each, now_s)
        if ended:
            yield from merge(reversed(self._ended), reversed(self._turned_away), key=_NUMBER, reverse=True)

    def _of_live(self, live: _Live, now_s: float) -> RequestEntry:
        end = RequestEnd(status=live.state["status"])
        return _record(0, live, now_s, end)


def _api_of(path: str) -> str:
    """Return the name of an API, which follows the version in its path if there is one."""
    parts = path.split("/")[1:]
    return parts[1] if re.fullmatch(r"v\d", parts[0]) else parts[0]


def ended_s(record: RequestEntry) -> float:
    """Unix time of a request's end."""
    return record.created_s + record.age_s


def _record(number: int, live: _Live, now_s: float, end: RequestEnd) -> RequestEntry:
    job, progress = live.job, live.progress
    arrival_s = job.arrival_s
    if job.num_choices == 1:
        run = progress.runs[0]
        worst = _summarize(arrival_s, run.samples[0])
        prompt, cached, output = run.prompt_tokens, run.cached_tokens, worst.tokens
        seen = None if worst.first_s is None else Latencies(worst.first_s, worst.tpot_s, worst.last_s or 0.0)
    else:
        run, sample = _worst_sample(job, progress)
        worst = _summarize(arrival_s, sample)
        usage = progress.usage()
        prompt, cached, output = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        seen = worst_latencies(progress.runs)
    cause, route = end.cause, run.route
    return RequestEntry(
        number=number,
        live=not number,
        id=job.id,
        request_id=job.request_id,
        api=job.api,
        model=job.model,
        stream=job.stream is not None,
        created_s=live.created_s,
        age_s=now_s - arrival_s,
        slo=job.meta.slo,
        outcome=end.outcome,
        finish=worst.finish or end.finish,
        reason=end.reason,
        status=end.status or None,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        choices=job.num_choices,
        seen=seen,
        worst=worst,
        route=None if route is None else replace(route),
        rejection=cause.rejection if isinstance(cause, SloUnattainable) else None,
        engine=live.first_engine if route is None else route.engine,
    )


def _summarize(arrival_s: float, sample: SampleRecord) -> SampleSummary:
    times, finish = sample.times, sample.finish_reason
    scheduled_s = first_s = last_s = None
    if times is not None and times.scheduled_s:
        scheduled_s = times.scheduled_s - times.arrival_s  # both on the engine's clock
    if sample.first_s:
        first_s, last_s = sample.first_s - arrival_s, sample.last_s - arrival_s
    return SampleSummary(
        scheduled_s,
        first_s,
        last_s,
        tpot_s(sample),
        sample.tokens,
        sample.preemptions,
        sample.why,
        finish or "",
        sample.first_why,
        sample.drafts,
    )


def _worst_sample(job: Job, progress: JobProgress) -> tuple[PromptRun, SampleRecord]:
    """Return the choice that kept its objectives least; between equals, the one with the latest first token."""
    pairs = ((run, sample) for run in progress.runs for sample in run.samples)
    return max(pairs, key=lambda pair: _badness(job.meta.slo, *pair))


def _badness(slo: Slo | None, run: PromptRun, sample: SampleRecord) -> tuple[bool, float, float]:
    """Sort key: incomplete, largest ratio of a latency to its objective, time to first token."""
    incomplete = sample.finish_reason is not None and sample.finish_reason not in COMPLETE
    if not sample.first_s:
        return incomplete, inf, inf
    ttft_s = sample.first_s - run.arrival_s
    if slo is None:
        return incomplete, 0.0, ttft_s
    pairs = ((ttft_s, slo.ttft_s), (tpot_s(sample), slo.tpot_s), (sample.last_s - run.arrival_s, slo.e2e_s))
    return incomplete, max((seen / promised for seen, promised in pairs if promised is not None), default=0.0), ttft_s
