"""POST /v1/completions."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from roseinfer.server.documents import Completion, inference_docs
from roseinfer.server.formats.planning import Draft, given
from roseinfer.server.formats.prompts import split_prompts
from roseinfer.server.formats.sampling import completion_logprobs, completion_max_tokens
from roseinfer.server.formats.schemas import CompletionRequest, parse
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job, Kind

PATH = "/v1/completions"


def add(app: FastAPI) -> None:
    """For the OpenAPI document and for other methods than POST: requests have a lane of their own, see `app.py`."""

    async def create_completion() -> Response:
        raise AssertionError("answered in its lane")

    docs = inference_docs(CompletionRequest, Completion)
    app.add_api_route(PATH, create_completion, methods=["POST"], tags=["inference"], **docs)


async def plan(call: Call, body: dict[str, Any]) -> Job:
    """Raises `ApiError` 400 or 404, `InvalidRequestError`."""
    request = parse(CompletionRequest, body)
    call.offer_request_id(request.request_id)
    prompts = split_prompts(request.prompt, call.limits.max_prompts)
    asked = completion_logprobs(request, call.limits)
    draft = Draft(call, request, completion_max_tokens(request), asked, len(prompts))
    echo = bool(request.echo)
    special = given(request.add_special_tokens, True)
    encoded = await call.backend.prompts.completion(prompts, special, echo, draft.keep_last)
    await draft.spell_out()
    return draft.job(Kind.COMPLETION, encoded, echo)
