"""POST /v1/messages/count_tokens: number of prompt tokens of a message."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.documents import docs
from roseinfer.server.formats.messages.document import MessageErrorBody, TokenCount
from roseinfer.server.formats.messages.request import CountTokensRequest, MessagesTranslation, field_names
from roseinfer.server.formats.translated_job import count_prompt_tokens
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.request.models import ServedModels


def add(app: FastAPI, models: ServedModels) -> None:
    async def count(request: Request) -> Response:
        async with models.preparing(request, CountTokensRequest) as (_, backend, wanted):
            chat = MessagesTranslation(wanted).chat
            return JsonResponse({"input_tokens": await count_prompt_tokens(backend, chat, field_names(wanted))})

    errors = (400, 401, 404, 408, 413, 503)
    described = docs(TokenCount, *errors, body=CountTokensRequest, error=MessageErrorBody)
    app.add_api_route("/v1/messages/count_tokens", count, methods=["POST"], tags=["tokens"], **described)
