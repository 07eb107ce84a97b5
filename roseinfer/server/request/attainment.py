"""How what was promised to a request was kept, as the server saw it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.outputs import COMPLETE, FinishReason
from roseinfer.core.slo import Slo
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.account import PromptRun, Sample
from roseinfer.server.request.job import Job
from roseinfer.server.request.slo_classes import NO_CLASS

OBJECTIVES = ("ttft", "tpot", "e2e")


class Outcome(StrEnum):
    MET = "met"  # it finished, in time as far as it was promised anything
    MISSED_TTFT = "missed_ttft"
    MISSED_TPOT = "missed_tpot"
    MISSED_E2E = "missed_e2e"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    FAILED = "failed"
    ABORTED = "aborted"  # the client left


class Measured(NamedTuple):
    """Seconds from arrival at the server to the first token, per token after it, and to the last token."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def measured(runs: Sequence[PromptRun]) -> Measured | None:
    """The worst of all samples in each respect; None if one of them has no token."""
    samples = [(run, sample) for run in runs for sample in run.samples]
    if not samples or any(not sample.first_s for _, sample in samples):
        return None
    return Measured(
        max(sample.first_s - run.arrival_s for run, sample in samples),
        max(_tpot_s(sample) for _, sample in samples),
        max(sample.last_s - run.arrival_s for run, sample in samples),
    )


def _tpot_s(sample: Sample) -> float:
    return (sample.last_s - sample.first_s) / (sample.tokens - 1) if sample.tokens > 1 else 0.0


def slack_s(slo: Slo, seen: Measured) -> dict[str, float]:
    """Objective less what was seen, for each objective that there is; negative = late."""
    promised = (slo.ttft_s, slo.tpot_s, slo.e2e_s)
    pairs = zip(OBJECTIVES, promised, seen, strict=True)
    return {name: limit - value for name, limit, value in pairs if limit is not None}


def outcome(slo: Slo | None, run: PromptRun) -> Outcome:
    """Of a prompt whose samples all came to an end of their own."""
    if any(sample.finish_reason is FinishReason.TIMEOUT for sample in run.samples):
        return Outcome.TIMEOUT
    seen = measured([run])
    if seen is None or any(sample.finish_reason not in COMPLETE for sample in run.samples):
        return Outcome.FAILED
    late = slo.missed(*seen) if slo else []
    return Outcome(f"missed_{late[0]}") if late else Outcome.MET


def cut_short(cause: BaseException) -> Outcome | None:
    """Of every prompt of a request that ended before its time; None if the request itself was wrong."""
    if isinstance(cause, InvalidRequestError):
        return None
    if isinstance(cause, ClientDisconnect):
        return Outcome.ABORTED
    if isinstance(cause, ApiError):
        return {429: Outcome.REJECTED, 504: Outcome.TIMEOUT}.get(cause.status, Outcome.FAILED)
    return Outcome.FAILED


def class_of(job: Job) -> str:
    return NO_CLASS if job.slo is None else job.slo.class_name


def usage_of(job: Job, runs: Sequence[PromptRun]) -> dict[str, Any]:
    """`usage.slo`: the worst of all choices; `met` is None if nothing was promised."""
    seen = measured(runs)
    return {
        "ttft_ms": None if seen is None else round(seen.ttft_s * 1000, 3),
        "tpot_ms": None if seen is None else round(seen.tpot_s * 1000, 3),
        "met": all(outcome(job.slo, run) is Outcome.MET for run in runs) if job.promised else None,
    }
