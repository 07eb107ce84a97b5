"""POST /v1/chat/completions."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from roseinfer.server.documents import ChatCompletion, inference_docs
from roseinfer.server.formats.planning import Draft, given
from roseinfer.server.formats.prompts import Encoded, plain_messages
from roseinfer.server.formats.sampling import chat_logprobs, chat_max_tokens
from roseinfer.server.formats.schemas import ChatRequest, parse
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job, Kind

PATH = "/v1/chat/completions"


def add(app: FastAPI) -> None:
    """For the OpenAPI document and for other methods than POST: requests have a lane of their own, see `app.py`."""

    async def create_chat_completion() -> Response:
        raise AssertionError("answered in its lane")

    docs = inference_docs(ChatRequest, ChatCompletion)
    app.add_api_route(PATH, create_chat_completion, methods=["POST"], tags=["inference"], **docs)


async def plan(call: Call, body: dict[str, Any]) -> Job:
    """Raises `ApiError` 400 or 404, `InvalidRequestError`."""
    request = parse(ChatRequest, body)
    call.offer_request_id(request.request_id)
    draft = Draft(call, request, chat_max_tokens(request), chat_logprobs(request, call.limits))
    messages, ignored = plain_messages(request.messages)
    draft.warnings += ignored
    ids = await call.backend.prompts.chat(
        messages,
        add_generation_prompt=given(request.add_generation_prompt, not request.continue_final_message),
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        kwargs=request.chat_template_kwargs or {},
        keep_last=draft.keep_last,
    )
    await draft.spell_out()
    return draft.job(Kind.CHAT, [Encoded(ids)])
