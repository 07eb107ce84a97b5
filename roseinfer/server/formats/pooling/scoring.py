"""POST /rerank and /score: from a query and documents to scores."""

from collections.abc import Callable
from typing import Any

from roseinfer.core.pooling import PoolingParams, PoolingTask
from roseinfer.server.formats.pooling.answer import RerankBody, ScoreBody
from roseinfer.server.formats.pooling.job import build_job, read_settings
from roseinfer.server.formats.pooling.request import PairFields, RerankDocument, RerankRequest, ScoreRequest
from roseinfer.server.http.errors import OPENAI, bad_request
from roseinfer.server.http.request_models import unknown_fields
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.job import Job, Usage
from roseinfer.server.request.receivers import Encoder
from roseinfer.text.tokenizer import Tokenizer

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")
# Names of the first and the second texts.
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))

Pairs = list[tuple[str, str]]


class RerankFormat:
    """Format of reranking, as in the APIs of Cohere and Jina. See `request.inference.AnswerFormat`."""

    dialect = OPENAI
    request_model = RerankRequest
    tasks = frozenset({PoolingTask.SCORE})

    def __init__(self, path: str) -> None:
        self.path = path

    async def make_job(self, call: RequestContext, request: RerankRequest) -> Job:
        texts = [document if isinstance(document, str) else document.text for document in request.documents]
        returned = texts if request.return_documents is not False else None
        about = {"documents": returned, "top_n": request.top_n or 0}
        pairs = [(request.query, text) for text in texts]
        return await _job(call, request, pairs, "documents", "rerank", about, _ignored(request))

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> Encoder:
        raise AssertionError("results are not streamed")

    def whole(self, job: Job, tokenizer: Tokenizer) -> RerankBody:
        return RerankBody(job)


class ScoreFormat:
    """Format of vLLM's scores. See `request.inference.AnswerFormat`."""

    dialect = OPENAI
    request_model = ScoreRequest
    tasks = frozenset({PoolingTask.SCORE})

    def __init__(self, path: str) -> None:
        self.path = path

    async def make_job(self, call: RequestContext, request: ScoreRequest) -> Job:
        pairs, field = _pairs(request)
        return await _job(call, request, pairs, field, "score", {})

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> Encoder:
        raise AssertionError("scores are not streamed")

    def whole(self, job: Job, tokenizer: Tokenizer) -> ScoreBody:
        return ScoreBody(job)


async def _job(
    call: RequestContext,
    request: PairFields,
    pairs: Pairs,
    field: str,
    api: str,
    about: dict[str, Any],
    ignored: list[str] | None = None,
) -> Job:
    """Return the job of pairs. `field`: of the documents."""
    settings = read_settings(call, request)
    settings.warnings.extend(ignored or ())
    assert settings.info.pairs is not None, "set for scores"
    if settings.cut is not None and settings.cut.at_start:
        raise bad_request("truncation_side must be 'right': the end of a document is cut", "truncation_side")
    encoder = call.backend.inputs
    found = await encoder.pairs(pairs, settings.info.pairs, request.instruction, settings.cut, field)
    inputs = [(pair.ids, PoolingParams()) for pair in found]
    return build_job(call, settings, inputs, api=api, id_prefix=api, about=about)


def _ignored(request: RerankRequest) -> list[str]:
    """Return the names of ignored fields of documents."""
    objects = [document for document in request.documents if isinstance(document, RerankDocument)]
    return list({f"documents.{name}"[:100]: None for document in objects for name in unknown_fields(document)})


def _pairs(request: ScoreRequest) -> tuple[Pairs, str]:
    """Return the pairs and the name of the second texts. Raises `ApiError` 400."""
    given = {name for sides in _SIDES for name in sides if getattr(request, name) is not None}
    sides = next((sides for sides in _SIDES if given == set(sides)), None)
    if sides is None:
        raise bad_request("give text_1 and text_2, data_1 and data_2, or queries and documents", "text_1")
    first, second = (_listed(getattr(request, name)) for name in sides)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        message = f"{sides[0]} must have one text, or as many as {sides[1]}: {len(first)} and {len(second)}"
        raise bad_request(message, sides[0])
    return list(zip(first, second, strict=True)), sides[1]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
