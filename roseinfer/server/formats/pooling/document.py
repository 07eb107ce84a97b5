"""Models of the answers of prompt-only requests for the OpenAPI document."""

from typing import Literal

from pydantic import ConfigDict, Field

from roseinfer.server.formats.request_document import AnswerModel, MeasuredSlo


class PromptCachedTokens(AnswerModel):
    cached_tokens: int


class ResultSlo(MeasuredSlo):
    """Latencies measured by the server, in ms; the worst of all inputs. `ttft_ms`: to the result."""


class PromptUsage(AnswerModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptCachedTokens
    slo: ResultSlo | None = None


class EmbeddingEntry(AnswerModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="numbers, or base64 of little-endian float32")


class EmbeddingList(AnswerModel):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    id: str
    created: int
    model: str
    usage: PromptUsage
    warnings: list[str] | None = None


class ScoreEntry(AnswerModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(AnswerModel):
    object: Literal["list"]
    data: list[ScoreEntry]
    id: str
    created: int
    model: str
    usage: PromptUsage
    warnings: list[str] | None = None


class RankedText(AnswerModel):
    text: str


class RankedDocument(AnswerModel):
    """`index`: position in the request. `document`: unless `return_documents` is false."""

    index: int
    document: RankedText | None = None
    relevance_score: float


class Reranking(AnswerModel):
    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]
    warnings: list[str] | None = None


class CohereEmbeddings(AnswerModel):
    """Lists of embeddings by type: those that were requested."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    float_: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = None


class CohereVersion(AnswerModel):
    version: Literal["2"]


class CohereTokens(AnswerModel):
    input_tokens: int


class CohereMeta(AnswerModel):
    api_version: CohereVersion
    billed_units: CohereTokens
    tokens: CohereTokens
    warnings: list[str] | None = None


class CohereEmbedding(AnswerModel):
    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
