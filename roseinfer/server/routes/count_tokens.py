"""POST /v1/messages/count_tokens: number of prompt tokens of a message."""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.documents import docs
from roseinfer.server.formats.messages.document import MessageErrorBody, TokenCount
from roseinfer.server.formats.messages.format import count_tokens
from roseinfer.server.formats.messages.request import CountTokensRequest
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.request.lifecycle import Ticket
from roseinfer.server.request.models import ServedModels


def add(app: FastAPI, models: ServedModels) -> None:
    async def count(request: Request) -> Response:
        service, backend, body = await models.read(request.scope, request.receive)
        with Ticket(service.lifecycle), service.prepare(request.scope):
            wanted = models.parser.parse(CountTokensRequest, body)
            service.resolve_model(wanted.model)
            return JsonResponse({"input_tokens": await count_tokens(backend, wanted)})

    errors = (400, 401, 404, 408, 413, 503)
    described = docs(TokenCount, *errors, body=CountTokensRequest, error=MessageErrorBody)
    app.add_api_route("/v1/messages/count_tokens", count, methods=["POST"], tags=["tokens"], **described)
