"""The end of a request, in the metrics and in one line of the log."""

import asyncio
import logging

from starlette.requests import ClientDisconnect

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.server.account import Account
from roseinfer.server.errors import ApiError
from roseinfer.server.job import Job
from roseinfer.server.metrics import EngineMetrics

log = logging.getLogger(__name__)


def log_start(job: Job) -> None:
    tokens = sum(len(prompt.ids) for prompt in job.prompts)
    kind = "stream" if job.stream else "whole"
    log.info("request=%s started %s choices=%d prompt_tokens=%d", job.request_id, kind, job.num_choices, tokens)


def report(job: Job, account: Account, metrics: EngineMetrics, now_s: float, cause: BaseException | None) -> None:
    """`cause`: what ended the request before its time, None if all of it finished."""
    reason, why = _classify(cause)
    for run in account.runs:
        metrics.prompt_ended(run, reason, now_s)
    if reason == FinishReason.ABORT:
        metrics.aborted(why)
    line = _line(job, account, now_s, reason if cause else "", why)
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
    if cause is None:
        return "", ""
    return FinishReason.ERROR, f"{type(cause).__name__}: {cause}"[:500]


def _line(job: Job, account: Account, now_s: float, reason: str, why: str) -> str:
    usage = account.usage()
    ends = sorted({str(s.finish_reason or reason) for run in account.runs for s in run.samples}) or [reason]
    parts = [
        f"request={job.request_id}",
        f"api={job.kind.whole_object}",
        f"choices={job.num_choices}",
        f"finish={','.join(ends)}",
        f"prompt_tokens={usage.prompt_tokens}",
        f"cached_tokens={usage.cached_tokens}",
        f"output_tokens={usage.completion_tokens}",
        f"e2e_ms={(now_s - job.arrival_s) * 1000:.1f}",
    ]
    first_s = min((run.first_s for run in account.runs if run.first_s is not None), default=None)
    if first_s is not None:
        parts.append(f"ttft_ms={(first_s - job.arrival_s) * 1000:.1f}")
    queued_s = _queue_time_s(account)
    if queued_s is not None:
        parts.append(f"queue_ms={queued_s * 1000:.1f}")
    if why:
        parts.append(f"why={why!r}")
    return " ".join(parts)


def _queue_time_s(account: Account) -> float | None:
    """The longest wait of a sample, on the engine's clock."""
    ended = [s.times for run in account.runs for s in run.samples if s.times is not None and s.times.scheduled_s]
    return max((times.scheduled_s - times.arrival_s for times in ended), default=None)
