"""Job of a request that was translated to a chat, and the length of its prompt."""

from dataclasses import replace

from roseinfer.server.formats.as_chat import FieldNames
from roseinfer.server.formats.chat import chat_job, encoded_chat, output_of
from roseinfer.server.formats.schemas import ChatRequest
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.job import Job
from roseinfer.server.request.service import Backend


async def translated_job(
    call: RequestContext, chat: ChatRequest, names: FieldNames, api: str, id_prefix: str, ignored: list[str]
) -> Job:
    """Return the job of a translated chat. `api`: its name, for records; `ignored`: further ignored fields.

    Raises `ApiError` 400.
    """
    with names.errors():
        job = await chat_job(call, chat)
    warnings = [names.translate(name) for name in job.warnings] + ignored
    kept = tuple(warnings[: call.service.limits.max_warnings])
    return replace(job, api=api, id=f"{id_prefix}_{job.request_id}", warnings=kept)


async def count_prompt_tokens(backend: Backend, chat: ChatRequest, names: FieldNames) -> int:
    """Return the number of prompt tokens of a translated chat. Raises `ApiError` 400."""
    with names.errors():
        prompt, _ = await encoded_chat(backend, chat, output=output_of(backend, chat))
    return len(prompt.ids)
