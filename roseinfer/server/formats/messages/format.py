"""POST /v1/messages: Anthropic's API, translated to a chat."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roseinfer.server.formats.blocks import BlockBody, BlockEncoder
from roseinfer.server.formats.messages.answer import MessageWriter
from roseinfer.server.formats.messages.dialect import ANTHROPIC
from roseinfer.server.formats.messages.request import MessagesRequest, MessagesTranslation, field_names
from roseinfer.server.formats.translated_job import translated_job
from roseinfer.server.request.inference import GENERATES, RequestContext, StandardRun
from roseinfer.server.request.job import Job, Usage
from roseinfer.text.tokenizer import Tokenizer

_NO_EDITS: dict[str, Any] = {"context_management": {"applied_edits": []}}


class MessagesFormat:
    """Format of Anthropic's Messages. See `request.inference.AnswerFormat`."""

    path = "/v1/messages"
    dialect = ANTHROPIC
    tasks = GENERATES
    make_run = StandardRun
    request_model = MessagesRequest

    async def make_job(self, call: RequestContext, request: MessagesRequest) -> Job:
        chat = MessagesTranslation(request)
        job = await translated_job(call, chat.chat, field_names(request), "messages", "msg", chat.warnings)
        edited = (request.model_extra or {}).get("context_management") is not None
        return replace(job, about=_NO_EDITS) if edited else job

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> BlockEncoder:
        return BlockEncoder(job, MessageWriter(job), usage)

    def whole(self, job: Job, tokenizer: Tokenizer) -> BlockBody:
        return BlockBody(job, MessageWriter(job))
