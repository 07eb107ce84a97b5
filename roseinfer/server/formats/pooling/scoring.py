"""POST /rerank and /score: from a query and documents to scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roseinfer.core.pooling import PoolingParams, PoolingTask
from roseinfer.server.formats.common_job import AnswerKind
from roseinfer.server.formats.pooling.answer import PoolingFormat, RerankBody, ScoreBody
from roseinfer.server.formats.pooling.job import PoolingSettings, build_job, prompt_text, read_settings
from roseinfer.server.formats.pooling.request import PairFields, RerankDocument, RerankRequest, ScoreRequest
from roseinfer.server.http.errors import bad_request
from roseinfer.server.http.request_models import unknown_fields
from roseinfer.server.request.inference import RequestContext
from roseinfer.server.request.inputs import InputName
from roseinfer.server.request.job import Job

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")
_RERANKING = AnswerKind("rerank", "rerank", "documents")
_SCORES = AnswerKind("score", "score", "text_2")
# Names of the first and the second texts.
_SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


@dataclass(frozen=True, slots=True)
class Sides:
    """Texts to score with each other: pair i is one of `first`, or its only one, with `second[i]`.

    `first_field`, `second_field`: their names in the request.
    """

    first: list[str]
    second: list[str]
    first_field: str
    second_field: str

    def check(self) -> None:
        """Raise `ApiError` 400 for an empty text."""
        for texts, field in ((self.first, self.first_field), (self.second, self.second_field)):
            if "" in texts:
                name = InputName(field, several=len(texts) > 1).of(texts.index(""))
                raise bad_request(f"{name} must not be empty", field)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first = self.first if len(self.first) > 1 else self.first * len(self.second)
        return list(zip(first, self.second, strict=True))


class _PairsFormat(PoolingFormat):
    """Common part of the formats of pairs, which have several paths."""

    tasks = frozenset({PoolingTask.SCORE, PoolingTask.EMBED})

    def __init__(self, path: str) -> None:
        self.path = path


class RerankFormat(_PairsFormat):
    """Format of reranking, as in the APIs of Cohere and Jina."""

    request_model = RerankRequest
    answer = RerankBody

    async def make_job(self, call: RequestContext, request: RerankRequest) -> Job:
        texts = [document if isinstance(document, str) else document.text for document in request.documents]
        returned = texts if request.return_documents is not False else None
        about = {"documents": returned, "top_n": request.top_n or 0}
        sides = Sides([request.query], texts, "query", "documents")
        return await _job(call, request, sides, _RERANKING, about, _ignored(request))


class ScoreFormat(_PairsFormat):
    """Format of vLLM's scores."""

    request_model = ScoreRequest
    answer = ScoreBody

    async def make_job(self, call: RequestContext, request: ScoreRequest) -> Job:
        return await _job(call, request, _sides(request), _SCORES, {})


async def _job(
    call: RequestContext,
    request: PairFields,
    sides: Sides,
    kind: AnswerKind,
    about: dict[str, Any],
    ignored: Sequence[str] = (),
) -> Job:
    """Return the job of some pairs, whose inputs are pairs or, if the model makes embeddings, texts."""
    settings = read_settings(call, request)
    sides.check()
    settings.warnings.extend(ignored)
    if settings.info.pairs is None:
        return await _cosine_job(call, request, settings, sides, kind, about)
    if settings.cut is not None and settings.cut.at_start:
        raise bad_request("truncation_side must be 'right': the end of a document is cut", "truncation_side")
    encoder, form = call.backend.inputs, settings.info.pairs
    found = await encoder.pairs(sides.pairs, form, request.instruction, settings.cut, sides.second_field)
    inputs = [(pair.ids, PoolingParams(second_text_from=pair.second_text_from)) for pair in found]
    return build_job(call, settings, inputs, kind, about)


async def _cosine_job(
    call: RequestContext,
    request: PairFields,
    settings: PoolingSettings,
    sides: Sides,
    kind: AnswerKind,
    about: dict[str, Any],
) -> Job:
    """Return the job of embeddings whose cosines are the scores."""
    if request.instruction is not None:
        raise bad_request("instruction is not supported: the model makes embeddings", "instruction")
    inputs = []
    for texts, field in ((sides.first, sides.first_field), (sides.second, sides.second_field)):
        name = InputName(field, several=len(texts) > 1)
        before = prompt_text(settings.info, None)
        inputs += await call.backend.inputs.texts(texts, True, settings.cut, name, before)
    several = len(sides.first) > 1
    pairs = [(i if several else 0, len(sides.first) + i) for i in range(len(sides.second))]
    pooled = [(ids, PoolingParams()) for ids in inputs]
    return build_job(call, settings, pooled, kind, about | {"pairs": pairs})


def _ignored(request: RerankRequest) -> list[str]:
    """Return the names of ignored fields of documents."""
    objects = [document for document in request.documents if isinstance(document, RerankDocument)]
    return list({f"documents.{name}"[:100]: None for document in objects for name in unknown_fields(document)})


def _sides(request: ScoreRequest) -> Sides:
    """Return the texts of a request. Raises `ApiError` 400."""
    given = {name for names in _SIDES for name in names if getattr(request, name) is not None}
    names = next((names for names in _SIDES if given == set(names)), None)
    if names is None:
        raise bad_request("give text_1 and text_2, data_1 and data_2, or queries and documents", "text_1")
    first, second = (_listed(getattr(request, name)) for name in names)
    if len(first) not in (1, len(second)):
        message = f"{names[0]} must have one text, or as many as {names[1]}: {len(first)} and {len(second)}"
        raise bad_request(message, names[0])
    return Sides(first, second, *names)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
