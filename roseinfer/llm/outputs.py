"""Results of `LLM.generate`, `LLM.chat`, `LLM.embed` and `LLM.score`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roseinfer.core.outputs import DraftTally, FinishReason
from roseinfer.core.slo import Rejection, Why


@dataclass(slots=True)
class Logprob:
    """Log probability of a token. `rank`: 1 = the most likely one. `decoded_token`: the token's text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprob = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    Args:
        index: number of the sample.
        text: the output.
        token_ids: its tokens.
        cumulative_logprob: sum of the tokens' log probabilities, if log probabilities were requested.
        logprobs: per token a dictionary of token id -> `Logprob`: the token itself and the most likely ones; None
            unless requested.
        finish_reason: `stop`, `length`, `error`, `rejected` or `timeout`; a string.
        stop_reason: the stop string or stop token id that ended the output; None for end-of-text tokens.
        error: why the sample failed, if `finish_reason` is `error`.
        rejection: why the scheduler rejected the request, if `finish_reason` is `rejected`.
        why: what the sample waited for, and how it ran.
        drafts: its verified drafts, and how many of them became output, by proposer; empty without speculation.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    rejection: Rejection | None = None
    why: Why | None = None
    drafts: Mapping[str, DraftTally] = field(default_factory=dict)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds since 1970; None = has not happened. Of several samples, the first one's.

    Args:
        arrival_time: when the engine received the request.
        first_scheduled_time: when its first step was planned.
        first_token_time: when its first token was sampled.
        last_token_time: when the last token of the last sample was sampled.
        finished_time: when its last sample ended.
        time_in_queue: seconds from arrival to the first step.
        num_generation_tokens: output tokens of all samples.
        preemptions: how often its samples lost their seat to other requests.

    The same times have the names of vLLM's newer versions: `queued_ts` (arrival), `scheduled_ts`, `first_token_ts` and
    `last_token_ts`; `first_token_latency` is the time from arrival to the first token.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    num_generation_tokens: int = 0
    preemptions: int = 0

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def queued_ts(self) -> float:
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float | None:
        return self.first_scheduled_time

    @property
    def first_token_ts(self) -> float | None:
        return self.first_token_time

    @property
    def last_token_ts(self) -> float | None:
        return self.last_token_time


@dataclass(slots=True)
class RequestOutput:
    """Result for one prompt.

    Args:
        request_id: number of the request, as text.
        prompt: text of the prompt; None if it was given as token ids.
        prompt_token_ids: its tokens, as the model received them.
        prompt_logprobs: like `CompletionOutput.logprobs` for the prompt's tokens, None for the first one; None unless
            requested.
        outputs: the samples.
        finished: True: `generate` and `chat` return whole results.
        metrics: times of the request.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of one input. `outputs` is the result itself, so `result.outputs.embedding` works as with vLLM.

    Args:
        request_id: number of the request, as text.
        embedding: the numbers: as many as the model's width, or as `dimensions`.
        prompt: text of the input, with what the model's prompt puts before it; None if it was given as token ids.
        prompt_token_ids: its tokens, as the model received them.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
    """

    request_id: str
    embedding: list[float]
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0

    @property
    def outputs(self) -> "EmbeddingOutput":
        return self


@dataclass(slots=True)
class ScoreOutput:
    """Score of one pair. `outputs` is the result itself, so `result.outputs.score` works as with vLLM.

    Args:
        request_id: number of the request, as text.
        score: between 0 and 1 for rerankers; a cosine for embedding models.
        prompt_token_ids: tokens of both texts, as the model received them.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
    """

    request_id: str
    score: float
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0

    @property
    def outputs(self) -> "ScoreOutput":
        return self
