"""What is noted of a request while it runs, for usage, metrics and the log."""

from dataclasses import dataclass, field
from typing import Any

from roseinfer.core.outputs import FinishReason, RequestTimes
from roseinfer.engine.api import SequenceChunk


@dataclass(slots=True)
class Sample:
    """One choice. `first_s`, `last_s`: when its first and its newest token came, 0 before the first."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: FinishReason | None = None
    times: RequestTimes | None = None
    preemptions: int = 0

    def note(self, chunk: SequenceChunk) -> None:
        self.tokens = chunk.num_output_tokens
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.times = chunk.times
            self.preemptions = chunk.preemptions


@dataclass(slots=True)
class PromptRun:
    """One prompt and its samples. `first_s`: when its first token came, None before."""

    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    samples: list[Sample]
    cached_tokens: int = 0
    first_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """`slo`: how objectives were kept, None if nobody wants to know or if there is more to come."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    slo: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        return fields if self.slo is None else fields | {"slo": self.slo}


@dataclass(slots=True)
class Account:
    """All prompts of one HTTP request, in order."""

    runs: list[PromptRun] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether some prompt has its first token."""
        return any(run.first_s is not None for run in self.runs)

    def usage(self) -> Usage:
        """Each prompt counts once, output tokens over all choices."""
        prompt = completion = cached = 0
        for run in self.runs:
            prompt += run.prompt_tokens
            cached += run.cached_tokens
            for sample in run.samples:
                completion += sample.tokens
        return Usage(prompt, completion, cached)
