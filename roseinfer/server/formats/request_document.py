"""Shapes of what is said of requests for the OpenAPI document: `/v1/requests`, and why in the usage."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from roseinfer.core.slo import Cause


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class RequestPhase(_Shape):
    """A part of its time, in ms from its arrival. `cause`: of a wait, null = nobody says, as on its way."""

    phase: Literal["wait", "prefill", "decode"]
    cause: Cause | None
    from_ms: float
    to_ms: float


class RequestRefused(_Shape):
    """`attainable_ms`: the least value of the objective that could have been kept, null = unknown."""

    objective: Literal["ttft", "tpot", "e2e"]
    cause: Cause
    predicted_ttft_ms: float | None
    attainable_ms: float | None
    hopeless: bool


class RequestWhy(_Shape):
    """What it waited for and how it ran, as its engine saw the choice that was worst.

    `verdict`: null if there is nothing to explain or nobody knows. `waited_ms`: without a seat, by cause. `chunks`:
    parts of the prompt that were computed; `steps` of the engine while it had a seat, `sat_out` of them without it.
    """

    verdict: Cause | Literal["preempted", "sat_out", "slow_steps", "client"] | None
    summary: str
    waited_ms: dict[str, float]
    preemptions: int
    chunks: int
    steps: int
    sat_out: int
    refused: RequestRefused | None
    timeline: list[RequestPhase]


class RequestObjectives(_Shape):
    """In ms; null = not promised, or unknown."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


class RequestPrediction(_Shape):
    """By the scheduling policy when it first saw the request, in ms."""

    ttft_ms: float | None
    tpot_ms: float | None


class RequestRouting(_Shape):
    """Between several engines. `reason`: why the newest of them; how often one refused it, and how often it left one
    without and with tokens.
    """

    reason: str
    retries: int
    placed_again: int
    resumes: int


class RequestState(_Shape):
    """A request that runs, or that has ended. Times are in ms from its arrival, which is `created`, in Unix seconds."""

    object: Literal["request"]
    id: str
    request_id: str
    api: Literal["chat", "completions", "responses", "messages"]
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


class RequestList(_Shape):
    object: Literal["list"]
    data: list[RequestState]
