"""Steps from a parsed request to a `Job` that all APIs share."""

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from roseinfer.core.request import Prompt
from roseinfer.server.formats.objectives import ObjectiveFields, Objectives, objectives
from roseinfer.server.formats.unsupported import ANY_TIER
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.job import Job


class AnswerKind(NamedTuple):
    """Kind of answer. `api`: name of its API, for records; `id_prefix`: start of its id.

    `prompt`: the request's field of what the model reads, for errors.
    """

    api: str
    id_prefix: str
    prompt: str


@dataclass(frozen=True, slots=True)
class CommonSettings:
    """Checked fields of a request that depend neither on its prompts nor on the format of its answer."""

    objectives: Objectives
    warnings: list[str]


def read_objectives(call: RequestContext, request: ObjectiveFields, warnings: list[str]) -> Objectives:
    """Return the objectives, and set the deadline of the preparation. Adds to `warnings`. Raises `ApiError` 400."""
    classes = call.service.slo_classes
    if request.service_tier not in ANY_TIER and request.service_tier not in classes.service_tiers:
        warnings.append("service_tier")
    adapter = call.model.adapter
    base = call.model.name if adapter is None else call.service.served_names[0]
    found = objectives(request, call.headers, call.arrival_s, classes, base, call.key, call.backend.info.policy)
    if adapter is not None:
        found = replace(found, meta=replace(found.meta, adapter=adapter))
    deadlines_s = [by_s for by_s in (found.meta.deadline_s, found.first_token_by_s) if by_s is not None]
    if deadlines_s:
        call.preparation.end_by(min(deadlines_s))
    return found


def new_job(call: RequestContext, settings: CommonSettings, prompts: list[Prompt], **fields: Any) -> Job:
    """Return the job of a checked request. `fields`: further fields of the job."""
    terms = settings.objectives
    return Job(
        request_id=call.request_id,
        model=call.model.name,
        created=int(time.time()),
        arrival_s=call.arrival_s,
        prompts=tuple(prompts),
        meta=terms.meta,
        warnings=tuple(settings.warnings[: call.service.limits.max_warnings]),
        first_token_by_s=terms.first_token_by_s,
        report_slo=terms.report,
        report_why=terms.why,
        **fields,
    )
