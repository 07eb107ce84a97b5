"""POST /v2/embed: embeddings in the form of Cohere's API."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.pooling import PoolingInfo, PoolingParams, PoolingTask
from roseinfer.server.formats.common_job import AnswerKind
from roseinfer.server.formats.pooling.answer import PoolingBody, PoolingFormat, as_base64, as_numbers
from roseinfer.server.formats.pooling.job import build_job, prompt_text, read_settings
from roseinfer.server.formats.pooling.request import PoolingFields, Texts
from roseinfer.server.formats.schemas import Count
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.inputs import InputName, Truncation
from roseinfer.server.request.job import Job, Usage

_EMBEDDING = AnswerKind("embeddings", "embd", "texts")
# Prompts of sentence-transformers for Cohere's kinds of input; others have the same name.
_PROMPTS = {"search_query": "query", "search_document": "document"}
_ENCODINGS: dict[str, Callable[[bytes], bytes]] = {"float": as_numbers, "base64": as_base64}


class CohereEmbedRequest(PoolingFields):
    texts: Texts
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = Field(
        None, description="selects the model's prompt of this name (query, document), if it has one"
    )
    embedding_types: Annotated[list[Literal["float", "base64"]], Field(min_length=1, max_length=2)] | None = Field(
        None, description="default: float"
    )
    output_dimension: Count | None = Field(None, description="like dimensions of /v1/embeddings")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="which end of a longer text is cut; default END; NONE: it is an error"
    )
    max_tokens: Count | None = Field(None, description="tokens to use of a text; default: as many as the context has")


class CohereEmbedBody(PoolingBody):
    """Builder of the answer."""

    def body(self, usage: Usage) -> bytes:
        job, about = self._job, self._job.about
        lists = {kind: b",".join(map(_ENCODINGS[kind], self._vectors)) for kind in about["types"]}
        meta: dict[str, Any] = {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": usage.prompt_tokens},
            "tokens": {"input_tokens": usage.prompt_tokens},
        }
        if job.warnings:
            meta["warnings"] = [f"{name} is ignored" for name in job.warnings]
        return orjson.dumps(
            {
                "id": job.id,
                "response_type": "embeddings_by_type",
                "embeddings": {kind: orjson.Fragment(b"[%b]" % entries) for kind, entries in lists.items()},
                "texts": about["texts"],
                "meta": meta,
            }
        )


class CohereEmbedFormat(PoolingFormat):
    """Format of Cohere's embeddings."""

    path = "/v2/embed"
    request_model = CohereEmbedRequest
    tasks = frozenset({PoolingTask.EMBED})
    answer = CohereEmbedBody

    async def make_job(self, call: RequestContext, request: CohereEmbedRequest) -> Job:
        settings = read_settings(call, request)
        if request.truncate == "NONE" and request.max_tokens is not None:
            raise bad_request("max_tokens needs truncate START or END", "max_tokens")
        if settings.cut is None and request.truncate != "NONE":
            context = call.backend.info.facts.max_model_len
            kept = min(request.max_tokens or context, context)
            settings = replace(settings, cut=Truncation(kept, at_start=request.truncate == "START"))
        params = _dimensions(settings.info, request.output_dimension)
        name, before = InputName("texts", several=True), _prompt(settings.info, request.input_type)
        inputs = await call.backend.inputs.texts(request.texts, True, settings.cut, name, before)
        about = {"types": request.embedding_types or ["float"], "texts": request.texts}
        pooled = [(ids, params) for ids in inputs]
        return build_job(call, settings, pooled, _EMBEDDING, about)


def _prompt(info: PoolingInfo, input_type: str | None) -> str:
    """Return the prompt for a kind of input; without one of its name, the model's default."""
    name = _PROMPTS.get(input_type or "", input_type)
    return prompt_text(info, name if name in info.prompts else None)


def _dimensions(info: PoolingInfo, width: int | None) -> PoolingParams:
    params = PoolingParams(dimensions=width)
    try:
        info.check(params)
    except InvalidRequestError as error:
        raise bad_request(error.message.replace("dimensions", "output_dimension", 1), "output_dimension") from error
    return params
