"""POST /tokenize and /detokenize, GET /tokenizer_info."""

import json
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.server.answer_shapes import Detokenized, Tokenized, TokenizerInfo
from roseinfer.server.documents import docs
from roseinfer.server.formats.chat import chat_prompt, plain_messages
from roseinfer.server.formats.schemas import DetokenizeRequest, TokenizeRequest
from roseinfer.server.formats.tool_fields import check_template, checked_tools
from roseinfer.server.formats.unsupported import check_extras
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import unknown_fields
from roseinfer.server.request.models import ServedModels
from roseinfer.server.request.prompts import PromptEncoder
from roseinfer.server.routes.query import MODEL_PARAMETER, chosen_model
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.worker.messages import Listed


def add(app: FastAPI, models: ServedModels) -> None:
    async def tokenize(request: Request) -> Response:
        async with models.preparing(request, TokenizeRequest) as (_, backend, wanted):
            warnings = check_extras(unknown_fields(wanted), 1)
            listed, ignored = await _listed(backend.prompts, wanted)
            answer: dict[str, Any] = {"count": listed.count, "max_model_len": backend.info.facts.max_model_len}
            answer["tokens"] = orjson.Fragment(listed.tokens)
            answer["token_strs"] = None if listed.strings is None else orjson.Fragment(listed.strings)
            return _with_warnings(answer, warnings + ignored)

    async def detokenize(request: Request) -> Response:
        async with models.preparing(request, DetokenizeRequest) as (_, backend, wanted):
            warnings = check_extras(unknown_fields(wanted), 1)
            if wanted.tokens:
                backend.prompts.check_ids(wanted.tokens, "tokens")
            return _with_warnings({"prompt": await backend.prompts.text(wanted.tokens)}, warnings)

    async def tokenizer_info(request: Request) -> Response:
        service = models.find(chosen_model(request.query_params.multi_items())).service
        # By json: orjson rejects 10**30, which means "unlimited" in many configs.
        return JsonResponse(json.dumps(_description(service.backend.tokenizer)).encode())

    described = docs(TokenizerInfo, 400, 401, 404, 503)
    described["openapi_extra"] = {"parameters": [MODEL_PARAMETER]}
    app.add_api_route("/tokenizer_info", tokenizer_info, tags=["tokens"], **described)
    errors = (400, 401, 404, 408, 413, 503)
    for path, handler, request, answer in (
        ("/tokenize", tokenize, TokenizeRequest, Tokenized),
        ("/detokenize", detokenize, DetokenizeRequest, Detokenized),
    ):
        app.add_api_route(path, handler, methods=["POST"], tags=["tokens"], **docs(answer, *errors, body=request))


async def _listed(prompts: PromptEncoder, wanted: TokenizeRequest) -> tuple[Listed, list[str]]:
    """Return the tokens and the names of ignored message fields."""
    with_strings = bool(wanted.return_token_strs)
    if (wanted.prompt is None) == (wanted.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if wanted.prompt is not None:
        if wanted.tools:
            raise bad_request("tools need messages", "tools")
        return await prompts.listed_text(wanted.prompt, wanted.add_special_tokens is not False, with_strings), []
    if wanted.tools:
        prompts.check_template()
        check_template(prompts.template_variables)
        checked_tools(wanted.tools)
    messages, ignored = plain_messages(wanted.messages or [])
    prompt = chat_prompt(prompts, wanted, messages, {"tools": wanted.tools} if wanted.tools else {})
    return await prompts.listed_chat(prompt, with_strings), ignored


def _description(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer's configuration without the path of the model."""
    config = {name: value for name, value in tokenizer.config.items() if name != "name_or_path"}
    named = {"tokenizer_class": config.get("tokenizer_class") or "PreTrainedTokenizerFast"}
    return {**config, **tokenizer.special_tokens, **named, "chat_template": tokenizer.chat_template}


def _with_warnings(answer: dict[str, Any], warnings: list[str]) -> Response:
    return JsonResponse(answer | {"warnings": warnings} if warnings else answer)
