"""POST /v1/responses: items in, items out, as a translation to a chat."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roseinfer.server.formats.blocks import BlockBody, BlockEncoder
from roseinfer.server.formats.responses.answer import ResponseWriter
from roseinfer.server.formats.responses.background import BackgroundRuns
from roseinfer.server.formats.responses.history import History
from roseinfer.server.formats.responses.request import FIELD_NAMES, ResponsesRequest, ResponsesTranslation
from roseinfer.server.formats.translated_job import translated_job
from roseinfer.server.http.errors import OPENAI
from roseinfer.server.request.inference import GENERATES, RequestContext
from roseinfer.server.request.job import Job, Usage
from roseinfer.text.tokenizer import Tokenizer

_TOOL = {"type": "function", "description": None, "parameters": None, "strict": False}


class ResponsesFormat:
    """Format of OpenAI's Responses. See `request.inference.AnswerFormat`. `history` None: responses are not stored."""

    path = "/v1/responses"
    dialect = OPENAI
    tasks = GENERATES
    request_model = ResponsesRequest

    def __init__(self, history: History | None = None) -> None:
        self._history = history or History()
        self.make_run = BackgroundRuns()

    async def make_job(self, call: RequestContext, request: ResponsesRequest) -> Job:
        """Return the job of a request. Raises `ApiError` 400, 404 or 503."""
        history = self._history
        whole = await history.whole(request, call.headers, call.service.limits.max_body_bytes)
        request = whole.request
        chat = ResponsesTranslation(request)
        warnings = chat.warnings + history.warnings(request)
        job = await translated_job(call, chat.chat, FIELD_NAMES, "responses", "resp", warnings)
        keeper = history.keeper(whole, call.headers)
        about = _about(chat.request, job) | {"store": keeper is not None}
        return replace(job, about=about, call_names=chat.call_names, store_answer=keeper)

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> BlockEncoder:
        return BlockEncoder(job, ResponseWriter(job), usage)

    def whole(self, job: Job, tokenizer: Tokenizer) -> BlockBody:
        return BlockBody(job, ResponseWriter(job))


def _about(request: ResponsesRequest, job: Job) -> dict[str, Any]:
    """Return the request fields that a response repeats, with defaults where the request gave none."""
    format = None if request.text is None else request.text.format
    params = job.prompts[0].params
    return {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "temperature": params.temperature,
        "text": {"format": format or {"type": "text"}},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [_TOOL | tool if tool.get("type") == "function" else tool for tool in request.tools or []],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
