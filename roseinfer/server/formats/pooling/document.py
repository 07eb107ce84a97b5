"""Models of the answers of prompt-only requests for the OpenAPI document."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from roseinfer.server.formats.request_document import RequestWhy


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)


class PromptCachedTokens(_Shape):
    cached_tokens: int


class ResultSlo(_Shape):
    """Latencies measured by the server, in ms; the worst of all inputs. `ttft_ms`: to the result."""

    ttft_ms: float | None
    tpot_ms: float | None
    met: bool | None
    why: RequestWhy | None = None


class PromptUsage(_Shape):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptCachedTokens
    slo: ResultSlo | None = None


class EmbeddingEntry(_Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="numbers, or base64 of little-endian float32")


class EmbeddingList(_Shape):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    id: str
    created: int
    model: str
    usage: PromptUsage
    warnings: list[str] | None = None


class ScoreEntry(_Shape):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(_Shape):
    object: Literal["list"]
    data: list[ScoreEntry]
    id: str
    created: int
    model: str
    usage: PromptUsage
    warnings: list[str] | None = None


class RankedText(_Shape):
    text: str


class RankedDocument(_Shape):
    """`index`: position in the request. `document`: unless `return_documents` is false."""

    index: int
    document: RankedText | None = None
    relevance_score: float


class Reranking(_Shape):
    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]
    warnings: list[str] | None = None


class CohereEmbeddings(_Shape):
    """Lists of embeddings by type: those that were requested."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    float_: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = None


class CohereVersion(_Shape):
    version: Literal["2"]


class CohereTokens(_Shape):
    input_tokens: int


class CohereMeta(_Shape):
    api_version: CohereVersion
    billed_units: CohereTokens
    tokens: CohereTokens
    warnings: list[str] | None = None


class CohereEmbedding(_Shape):
    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
