"""Log lines about requests: one at the end of each, and one at its start if that is configured."""

import logging
import os
import time
from functools import cache
from json.encoder import encode_basestring_ascii as _quote
from typing import Any

from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.server.observe.records import RequestEntry
from roseinfer.server.observe.verdict import verdict
from roseinfer.server.request.job import Job, JobProgress, Outcome, RequestEnd, slo_class_name

# Part of the log's format: filters and the JSON field `logger` have this name.
log = logging.getLogger("roseinfer.server.observe.report")

# Outcomes that the log explains with a verdict: missed objectives.
_EXPLAINED = frozenset(
    (Outcome.MISSED_TTFT, Outcome.MISSED_TPOT, Outcome.MISSED_E2E, Outcome.REJECTED, Outcome.TIMEOUT)
)


class LogLine:
    """Log line about a request: `name=value` pairs as text, or `event` and members of a JSON object.

    Fields are text or whole numbers, and floats if their name ends in `_ms`.
    """

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: dict[str, Any]) -> None:
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        return _template(tuple(self.fields)) % tuple(self.fields.values())

    def json_members(self) -> str:
        """Return `event` as `message` and the fields as in a JSON object, without its braces. See `core.logs`."""
        values = [value if type(value) in (int, float) else _quote(value) for value in self.fields.values()]
        return _json_template(self.event, tuple(self.fields)) % tuple(values)


@cache
def _json_template(event: str, names: tuple[str, ...]) -> str:
    members = [f'"{name}": %{".3f" if name.endswith("_ms") else "s"}' for name in names]
    return ", ".join([f'"message": {_quote(event)}', *members])


@cache
def _template(names: tuple[str, ...]) -> str:
    """Return the text of a line with these fields. Few combinations occur, each of them often."""
    return " ".join([f"{name}=%{'.1f' if name.endswith('_ms') else 'r' if name == 'why' else 's'}" for name in names])


class _RequestRecord(logging.LogRecord):
    """Record of a line about a request, made in half the time of the standard library's.

    It has no thread and no task, as if `logging.logThreads` were off. The fields of all lines are copied.
    """

    def __init__(self, level: int, line: LogLine, error: BaseException | None) -> None:
        now_s = time.time()
        self.__dict__ = {
            **_SHARED,
            "levelno": level,
            "levelname": _LEVELS[level],
            "msg": line,
            "exc_info": None if error is None else (type(error), error, error.__traceback__),
            "process": os.getpid(),
            "created": now_s,
            "msecs": now_s % 1 * 1000,
            "relativeCreated": (now_s - _START_S) * 1000,
        }


_START_S = time.time()
_LEVELS = {level: logging.getLevelName(level) for level in (logging.INFO, logging.ERROR)}
_SHARED = vars(logging.LogRecord(log.name, logging.INFO, __file__, 0, "", (), None, "log_end")) | dict.fromkeys(
    ("thread", "threadName", "processName")
)


def log_start(job: Job, *, name_model: bool = False) -> None:
    """Log the start of a request. `name_model`: include the name of its model."""
    tokens = sum(len(prompt.ids) for prompt in job.prompts)
    kind = "stream" if job.stream else "whole"
    fields = {"request": job.request_id, "started": kind, "choices": job.num_choices, "prompt_tokens": tokens}
    if name_model:
        fields["model"] = job.model
    log.info(LogLine("request started", fields))


def log_early_abort(request_id: str, end: RequestEnd) -> None:
    fields = {"request": request_id, "finish": end.finish, "why": end.reason}
    log.info(LogLine("request aborted before it reached the engine", fields))


def log_end(
    job: Job, progress: JobProgress, record: RequestEntry, end: RequestEnd, *, name_model: bool = False
) -> None:
    """Log the end of a request that reached the engine. Cheap if the level is off. `name_model`: see `log_start`."""
    level = logging.ERROR if end.finish == FinishReason.ERROR else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = _fields(record, job, progress, end.finish)
    fields["slo_class"], fields["slo"] = slo_class_name(job), record.outcome or "invalid"
    if name_model:
        fields["model"] = job.model
    if end.reason:
        fields["why"] = end.reason
    if record.outcome in _EXPLAINED:
        fields["verdict"] = verdict(record).name or "none"
    bug = end.cause if level == logging.ERROR and not isinstance(end.cause, RoseinferError) else None
    # `log.log` would search the stack for this line and make a record of more fields: two fifths of the time.
    log.handle(_RequestRecord(level, LogLine("request ended", fields), bug))


def _fields(record: RequestEntry, job: Job, progress: JobProgress, reason: str) -> dict[str, Any]:
    """Return the fields of an ended request's log line. `reason`: finish reason of unfinished samples."""
    sample = record.worst
    finish, first_s, seat_s = record.finish, sample.first_s, sample.scheduled_s
    if record.choices > 1:
        finish, first_s, seat_s = _of_all(job, progress, reason)
    fields: dict[str, Any] = {
        "request": record.request_id,
        "api": record.api,
        "choices": record.choices,
        "finish": finish or reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "e2e_ms": record.age_s * 1000,
    }
    if sample.drafts or record.choices > 1:
        drafts = progress.drafts()
        if drafts.drafted:
            fields["drafted_tokens"], fields["accepted_tokens"] = drafts
    if first_s is not None:
        fields["ttft_ms"] = first_s * 1000
    if seat_s is not None:
        fields["queue_ms"] = seat_s * 1000
    return fields


def _of_all(job: Job, progress: JobProgress, reason: str) -> tuple[str, float | None, float | None]:
    """Return the finish reasons of all choices, the earliest first token and the latest seat, in seconds."""
    samples = [sample for run in progress.runs for sample in run.samples]
    ends = sorted({str(sample.finish_reason or reason) for sample in samples})
    firsts = [sample.first_s - job.arrival_s for sample in samples if sample.first_s]
    times = [sample.times for sample in samples if sample.times is not None and sample.times.scheduled_s]
    seats = [each.scheduled_s - each.arrival_s for each in times]
    return ",".join(ends), min(firsts, default=None), max(seats, default=None)
