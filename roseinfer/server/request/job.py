"""One HTTP request after validation: everything the answer needs, nothing left to decide."""

from dataclasses import dataclass

from roseinfer.core.request import NO_META, RequestMeta
from roseinfer.core.sampling import SamplingParams
from roseinfer.core.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is what `echo` gives back: the prompt as written, or decoded from the ids; empty without `echo`.

    `meta` is the job's, with a length of its own if that was predicted.
    """

    ids: list[int]
    params: SamplingParams
    meta: RequestMeta = NO_META
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoices:
    """How a stream is cut. `interval`: tokens per chunk at least."""

    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`prompts` x `n` choices; choice i is sample i % n of prompt i // n. `api`: what logs call the kind of
    answer; `id`: the answer's own.

    `logprobs` and `prompt_logprobs` are the numbers of alternatives asked for (None = none); `stream` is None for a
    whole answer. `created` is in Unix seconds.

    `meta`: what it brings for the engine. `first_token_by_s`: on the same clock, when it ends unless it has a token.
    `report_slo`: whether the usage says how its objectives were kept. `lengths_predicted`: whether the lengths of its
    prompts are our own predictor's.
    """

    api: str
    id: str
    request_id: str
    model: str
    created: int
    arrival_s: float
    prompts: tuple[Prompt, ...]
    meta: RequestMeta = NO_META
    n: int = 1
    stream: StreamChoices | None = None
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    warnings: tuple[str, ...] = ()
    first_token_by_s: float | None = None
    report_slo: bool = False
    lengths_predicted: bool = False

    @property
    def promised(self) -> bool:
        """Whether it has an objective."""
        return self.slo is not None and not self.slo.empty

    @property
    def slo(self) -> Slo | None:
        """None: it was promised nothing."""
        return self.meta.slo

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n
