"""The end of a request, in the metrics and in one line of the log."""

import asyncio
import logging
import math

from starlette.requests import ClientDisconnect

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.server.http.errors import ApiError, SloUnattainable
from roseinfer.server.observe.metrics import EngineMetrics
from roseinfer.server.observe.slo_metrics import SloMetrics
from roseinfer.server.request.account import Account
from roseinfer.server.request.attainment import class_of
from roseinfer.server.request.job import Job

log = logging.getLogger(__name__)


def log_start(job: Job) -> None:
    tokens = sum(len(prompt.ids) for prompt in job.prompts)
    kind = "stream" if job.stream else "whole"
    log.info("request=%s started %s choices=%d prompt_tokens=%d", job.request_id, kind, job.num_choices, tokens)


def report(
    job: Job,
    account: Account,
    metrics: EngineMetrics,
    slo_metrics: SloMetrics,
    now_s: float,
    cause: BaseException | None,
) -> None:
    """`cause`: what ended the request before its time, None if all of it finished."""
    reason, why = _classify(cause)
    for run in account.runs:
        metrics.prompt_ended(run, reason, now_s)
    if reason == FinishReason.ABORT:
        metrics.aborted(why)
    if isinstance(cause, SloUnattainable):
        metrics.refused("slo_unattainable")
    came = slo_metrics.ended(job, account.runs, cause)
    line = _line(job, account, now_s, reason if cause else "")
    line += f" slo_class={class_of(job)} slo={came or 'invalid'}"
    if why:
        line += f" why={why!r}"
    if reason == FinishReason.ERROR:
        log.error("%s", line, exc_info=None if isinstance(cause, RoseinferError) else cause)
    else:
        log.info("%s", line)


def _classify(cause: BaseException | None) -> tuple[str, str]:
    """(finish reason of what had not finished, a word on why)."""
    if isinstance(cause, ClientDisconnect):
        return FinishReason.ABORT, "disconnect"
    if isinstance(cause, asyncio.CancelledError) or (isinstance(cause, ApiError) and cause.code == "draining"):
        return FinishReason.ABORT, "shutdown"
    if isinstance(cause, InvalidRequestError):
        return "rejected", cause.code or "invalid"
    if isinstance(cause, ApiError) and cause.status == 429:
        return "rejected", cause.code or "limit"
    if isinstance(cause, ApiError) and cause.status == 504:
        return FinishReason.TIMEOUT, cause.code or "limit"
    if cause is None:
        return "", ""
    return FinishReason.ERROR, f"{type(cause).__name__}: {cause}"[:500]


def _line(job: Job, account: Account, now_s: float, reason: str) -> str:
    usage = account.usage()
    ends: set[str] = set()
    first_s, queued_s = math.inf, -math.inf
    for run in account.runs:
        if run.first_s is not None:
            first_s = min(first_s, run.first_s)
        for sample in run.samples:
            ends.add(str(sample.finish_reason or reason))
            if sample.times is not None and sample.times.scheduled_s:  # the longest wait, on the engine's clock
                queued_s = max(queued_s, sample.times.scheduled_s - sample.times.arrival_s)
    line = (
        f"request={job.request_id} api={job.kind.whole_object} choices={job.num_choices} "
        f"finish={','.join(sorted(ends)) or reason} prompt_tokens={usage.prompt_tokens} "
        f"cached_tokens={usage.cached_tokens} output_tokens={usage.completion_tokens} "
        f"e2e_ms={(now_s - job.arrival_s) * 1000:.1f}"
    )
    if first_s < math.inf:
        line += f" ttft_ms={(first_s - job.arrival_s) * 1000:.1f}"
    if queued_s > -math.inf:
        line += f" queue_ms={queued_s * 1000:.1f}"
    return line
