"""Job of a request that was translated to a chat."""

from dataclasses import replace

from roseinfer.server.formats.as_chat import FieldNames
from roseinfer.server.formats.chat import chat_job
from roseinfer.server.formats.schemas import ChatRequest
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.job import Job


async def translated_job(
    call: RequestContext, chat: ChatRequest, names: FieldNames, api: str, id_prefix: str, ignored: list[str]
) -> Job:
    """Return the job of a translated chat. `api`: kind of answer, for logs; `ignored`: further ignored fields.

    Raises `ApiError` 400 or 404.
    """
    with names.errors():
        job = await chat_job(call, chat)
    warnings = [names.translate(name) for name in job.warnings] + ignored
    kept = tuple(warnings[: call.limits.max_warnings])
    return replace(job, api=api, id=f"{id_prefix}_{job.request_id}", warnings=kept)
