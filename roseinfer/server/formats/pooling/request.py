"""Request bodies of embeddings, reranking and scores. See `formats.schemas`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from roseinfer.server.formats.schemas import (
    MAX_ITEMS,
    MAX_OBJECTS,
    Count,
    Messages,
    PromptIds,
    Prompts,
    SchedulingFields,
    SloFields,
    Strings,
)
from roseinfer.server.http.request_models import RequestModel

Texts = Annotated[Strings, Field(min_length=1), Prompts]


class PoolingFields(SchedulingFields):
    """Fields that these APIs share."""

    user: str | None = Field(None, description="accepted, not used")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] | None = Field(
        None, description="number of tokens to use of a longer input; -1 = as many as the context has"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="'right' (default) cuts the end of a longer input, 'left' its start"
    )
    slo: SloFields | None = Field(None, description="latency objectives; ttft_ms and e2e_ms count to the result")

    @property
    def tpot(self) -> None:
        """Return None: there are no tokens after the first."""
        return None

    @property
    def pred_output_len(self) -> None:
        return None


class EmbeddingRequest(PoolingFields):
    input: (
        str
        | PromptIds
        | Texts
        | Annotated[list[PromptIds], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), Prompts]
        | None
    ) = Field(None, description="text or token ids, one or several; either this or messages")
    messages: Messages | None = Field(None, description="a chat, which becomes one input by the chat template")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32; default float"
    )
    dimensions: Count | None = Field(
        None, description="leading numbers of an embedding to return, normalised again; default: all"
    )
    prompt_name: str | None = Field(
        None, description="a prompt of the model's sentence-transformers configuration, put before each text"
    )
    add_special_tokens: bool | None = Field(None, description="default: true for texts, false for messages")
    add_generation_prompt: bool | None = Field(None, description="with messages; default false")
    continue_final_message: bool | None = Field(None, description="with messages; default false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="with messages: variables of the template")


class RerankDocument(RequestModel):
    text: str


class PairFields(PoolingFields):
    """Fields of the APIs that score a query and a document."""

    instruction: str | None = Field(None, description="the task, for models that are given one; default: the model's")


class RerankRequest(PairFields):
    query: str
    documents: Annotated[
        list[str | RerankDocument], Field(fail_fast=True, min_length=1, max_length=MAX_OBJECTS), Prompts
    ] = Field(description="texts, or objects with a text")
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="best results to return; 0 (default) = all")
    return_documents: bool | None = Field(None, description="put each document in its result; default true")


class ScoreRequest(PairFields):
    """Two texts or lists of texts under one of several pairs of names: one with each, or pair by pair."""

    text_1: str | Texts | None = Field(None, description="query or queries; or data_1, or queries")
    text_2: str | Texts | None = Field(None, description="document or documents; or data_2, documents, items")
    data_1: str | Texts | None = Field(None, description="like text_1")
    data_2: str | Texts | None = Field(None, description="like text_2")
    queries: str | Texts | None = Field(None, description="like text_1")
    documents: str | Texts | None = Field(None, description="like text_2")
    items: str | Texts | None = Field(None, description="like text_2")
