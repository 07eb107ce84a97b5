"""POST /v1/embeddings: from texts or token ids to vectors."""

from typing import Any

from roseinfer.core.pooling import PoolingParams, PoolingTask
from roseinfer.server.formats.chat import chat_prompt, plain_messages
from roseinfer.server.formats.common_job import AnswerKind
from roseinfer.server.formats.completions import split_prompts
from roseinfer.server.formats.pooling.answer import EmbeddingBody, PoolingFormat
from roseinfer.server.formats.pooling.job import PoolingSettings, build_job, prompt_text, read_settings
from roseinfer.server.formats.pooling.request import EmbeddingRequest
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.inputs import InputName
from roseinfer.server.request.job import Job

_EMBEDDING = AnswerKind("embeddings", "embd", "input")


class EmbeddingFormat(PoolingFormat):
    """Format of OpenAI's embeddings."""

    path = "/v1/embeddings"
    request_model = EmbeddingRequest
    tasks = frozenset({PoolingTask.EMBED})
    answer = EmbeddingBody

    async def make_job(self, call: RequestContext, request: EmbeddingRequest) -> Job:
        settings = read_settings(call, request)
        params = PoolingParams(dimensions=request.dimensions)
        settings.info.check(params)
        if (request.input is None) == (request.messages is None):
            raise bad_request("give either input or messages", "input")
        if request.input is None:
            inputs = [await _chat(call, request, settings)]
        else:
            inputs = await _inputs(call, request, settings)
        about = {"base64": request.encoding_format == "base64"}
        pooled = [(ids, params) for ids in inputs]
        return build_job(call, settings, pooled, _EMBEDDING, about)


async def _inputs(call: RequestContext, request: EmbeddingRequest, settings: PoolingSettings) -> list[list[int]]:
    inputs: list[Any] = split_prompts(request.input or "")
    name = InputName("input", several=isinstance(request.input, list) and len(inputs) > 1)
    encoder = call.backend.inputs
    if not isinstance(inputs[0], str):
        if request.prompt_name is not None:
            raise bad_request("prompt_name needs inputs that are texts", "prompt_name")
        return encoder.ids(inputs, settings.cut, name)
    before = prompt_text(settings.info, request.prompt_name)
    return await encoder.texts(inputs, request.add_special_tokens is not False, settings.cut, name, before)


async def _chat(call: RequestContext, request: EmbeddingRequest, settings: PoolingSettings) -> list[int]:
    prompts = call.backend.prompts
    if settings.cut is not None and not settings.cut.at_start:
        raise bad_request("messages need truncation_side 'left': the start of a chat is cut", "truncation_side")
    messages, ignored = plain_messages(request.messages or [])
    settings.warnings.extend(ignored)
    keep = None if settings.cut is None else settings.cut.keep
    encoded = await prompts.chat(chat_prompt(prompts, request, messages, {}, keep, answered=False))
    return call.backend.inputs.ids([encoded.ids], None, InputName("messages", several=False))[0]
