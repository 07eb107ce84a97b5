"""POST /v1/responses: items in, items out, as a translation to a chat."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roseinfer.server.formats.as_chat import translated_job
from roseinfer.server.formats.blocks import BlockBody, BlockEncoder
from roseinfer.server.formats.planning import given
from roseinfer.server.formats.responses.answer import ResponseWriter
from roseinfer.server.formats.responses.request import WORDS, ResponsesRequest, Translation
from roseinfer.server.formats.schemas import parse
from roseinfer.server.http.errors import OPENAI
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job, Usage
from roseinfer.text.tokenizer import Tokenizer

_TOOL = {"type": "function", "description": None, "parameters": None, "strict": False}


class ResponsesFormat:
    """OpenAI's Responses, of which none is kept. See `request.inference.AnswerFormat`."""

    path = "/v1/responses"
    dialect = OPENAI

    async def plan(self, call: Call, body: dict[str, Any]) -> Job:
        """Raises `ApiError` 400 or 404."""
        request = parse(ResponsesRequest, body)
        chat = Translation(request)
        job = await translated_job(call, chat.chat, WORDS, "response", "resp", chat.warnings)
        return replace(job, about=_about(request, job), called=chat.names)

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> BlockEncoder:
        return BlockEncoder(job, ResponseWriter(job), usage)

    def whole(self, job: Job, tokenizer: Tokenizer) -> BlockBody:
        return BlockBody(job, ResponseWriter(job))


def _about(request: ResponsesRequest, job: Job) -> dict[str, Any]:
    """What a response repeats of its request, with the values that were used where it gave none."""
    format = None if request.text is None else request.text.format
    params = job.prompts[0].params
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": given(request.parallel_tool_calls, True),
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "temperature": params.temperature,
        "text": {"format": given(format, {"type": "text"})},
        "tool_choice": given(request.tool_choice, "auto"),
        "tools": [_TOOL | tool if tool.get("type") == "function" else tool for tool in request.tools or []],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
