"""Models of request records for the OpenAPI document: `/v1/requests` and `usage.slo`. Base of models of answers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from roseinfer.core.slo import Cause


class AnswerModel(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)


class RequestPhase(AnswerModel):
    """Phase of a request, in ms from its arrival. `cause`: of a wait; null = unknown, for example transit."""

    phase: Literal["wait", "prefill", "decode"]
    cause: Cause | None
    from_ms: float
    to_ms: float


class RequestRefused(AnswerModel):
    """Rejection. `attainable_ms`: smallest value of the objective that could be met, null = unknown."""

    objective: Literal["ttft", "tpot", "e2e"]
    cause: Cause
    predicted_ttft_ms: float | None
    attainable_ms: float | None
    hopeless: bool


class RequestDrafts(AnswerModel):
    """Verified drafts of one proposer, and those of them that became output."""

    drafted: int
    accepted: int


class RequestWhy(AnswerModel):
    """Waits and steps of the worst choice, as its engine reported them.

    `verdict`: null if unknown or nothing to explain. `waited_ms`: time without a seat, by cause. `chunks`: computed
    chunks of the prompt. `steps`: engine steps while it had a seat, `sat_out` of them without it. `drafts`: by
    proposer.
    """

    verdict: Cause | Literal["preempted", "sat_out", "slow_steps", "client"] | None
    summary: str
    waited_ms: dict[str, float]
    preemptions: int
    chunks: int
    steps: int
    sat_out: int
    drafts: dict[str, RequestDrafts]
    refused: RequestRefused | None
    timeline: list[RequestPhase]


class MeasuredSlo(AnswerModel):
    """Base of `usage.slo`."""

    ttft_ms: float | None
    tpot_ms: float | None
    met: bool | None
    why: RequestWhy | None = None


class RequestObjectives(AnswerModel):
    """Latencies in ms; null = no objective, or unknown."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


class RequestPrediction(AnswerModel):
    """Forecast of the scheduling policy when it first saw the request, in ms."""

    ttft_ms: float | None
    tpot_ms: float | None


class RequestRouting(AnswerModel):
    """Path over several engines. `reason`: of the newest placement. `retries`: rejections by an engine.

    `placed_again`, `resumes`: how often it left an engine without and with tokens.
    """

    reason: str
    retries: int
    placed_again: int
    resumes: int


class RequestState(AnswerModel):
    """Running or ended request. Times are in ms from its arrival, `created` in Unix seconds."""

    object: Literal["request"]
    id: str
    request_id: str
    api: Literal["chat", "completions", "responses", "messages", "embeddings", "rerank", "score"]
    model: str
    state: Literal["live", "ended"]
    stream: bool
    created: float
    class_: str = Field(alias="class")
    objectives: RequestObjectives
    predicted: RequestPrediction
    seen: RequestObjectives
    outcome: (
        Literal["met", "missed_ttft", "missed_tpot", "missed_e2e", "rejected", "timeout", "failed", "aborted"] | None
    )
    finish: str | None
    status: int | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: int
    engine: int | None
    routing: RequestRouting | None
    why: RequestWhy


class RequestList(AnswerModel):
    object: Literal["list"]
    data: list[RequestState]
