"""One HTTP request after validation: everything the answer needs, nothing left to decide."""

from dataclasses import dataclass
from enum import Enum

from roseinfer.core.sampling import SamplingParams
from roseinfer.core.slo import Slo


class Kind(Enum):
    """Value: (prefix of the response id, object of a whole answer, object of a chunk)."""

    COMPLETION = ("cmpl", "text_completion", "text_completion")
    CHAT = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    @property
    def id_prefix(self) -> str:
        return self.value[0]

    @property
    def whole_object(self) -> str:
        return self.value[1]

    @property
    def chunk_object(self) -> str:
        return self.value[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is what `echo` gives back: the prompt as written, or decoded from the ids; empty without `echo`.

    `predicted_len`: how many tokens the output will have, if somebody guessed.
    """

    ids: list[int]
    params: SamplingParams
    text: str = ""
    predicted_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoices:
    """How a stream is cut. `interval`: tokens per chunk at least."""

    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`prompts` x `n` choices; choice i is sample i % n of prompt i // n.

    `logprobs` and `prompt_logprobs` are the numbers of alternatives asked for (None = none); `stream` is None for a
    whole answer. `created` is in Unix seconds, `arrival_s` on the server's monotonic clock.

    `slo`: None = nothing was promised. `deadline_s`: on the same clock, when it ends with what it has;
    `first_token_by_s`: when it ends unless it has a token. `report_slo`: whether the usage says how it went.
    `lengths_predicted`: whether the `predicted_len` of its prompts are our own predictor's.
    """

    kind: Kind
    request_id: str
    model: str
    created: int
    arrival_s: float
    prompts: tuple[Prompt, ...]
    n: int = 1
    cache_salt: str = ""
    stream: StreamChoices | None = None
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    warnings: tuple[str, ...] = ()
    slo: Slo | None = None
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    first_token_by_s: float | None = None
    report_slo: bool = False
    lengths_predicted: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind.id_prefix}-{self.request_id}"

    @property
    def promised(self) -> bool:
        """Whether it has an objective."""
        return self.slo is not None and not self.slo.empty

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n
