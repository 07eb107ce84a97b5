"""Latency objectives of a request, and what is said of one that is turned away."""

from dataclasses import dataclass, fields
from enum import StrEnum
from math import isfinite
from typing import NamedTuple

from roseinfer.core.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request was promised, in seconds; None = nothing.

    `ttft_s`: from arrival to the first token. `tpot_s`: (last token - first token) / (tokens - 1), so tokens ahead of
    schedule may pay for later ones. `e2e_s`: from arrival to the last token. `class_name` groups requests in reports.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    class_name: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float | int) and not (isfinite(value) and value > 0):
                raise InvalidRequestError(f"{f.name} must be positive and finite, got {value}", f"slo.{f.name}")

    @property
    def empty(self) -> bool:
        """Whether nothing was promised: best effort."""
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None

    def missed(self, ttft_s: float, tpot_s: float, e2e_s: float) -> list[str]:
        """Which of "ttft", "tpot" and "e2e" a request that finished did not keep. `tpot_s` is 0 for a single token."""
        pairs = (("ttft", ttft_s, self.ttft_s), ("tpot", tpot_s, self.tpot_s), ("e2e", e2e_s, self.e2e_s))
        return [name for name, seen, promised in pairs if promised is not None and seen > promised]


class Cause(StrEnum):
    """What a request waits for, and what stood against one that was turned away: what it waited for last.

    `IDLE` only refusals have, and `LOAD`, `PARENT`, `GRAMMAR` and `ENGINE` only waits.
    """

    IDLE = "idle"  # nothing: an idle machine would not have promised it either
    PRICE = "price"  # more is asked than can be done, and it is more work than what is served
    PACE = "pace"  # more is asked than can be done, and steps as short as it needs cost too many others their place
    QUEUE = "queue"  # the prompts before its own
    UTILISATION = "utilisation"  # those that run: they and it would not have a token in time
    BLOCKS = "blocks"  # room in the KV cache
    LOAD = "load"  # K and V of its prefix, on their way from host memory
    SEATS = "seats"  # one of `max_num_seqs`
    STEP = "step"  # the end of the step that ran when it came: nobody starts within one
    BUDGET = "prompt_budget"  # the prompt tokens that one step computes
    TENANT = "tenant"  # its tenant had more than its share
    PARENT = "parent"  # sample 0 of the same request, which computes the prompt for all
    GRAMMAR = "grammar"  # its grammar, which was being compiled
    ENGINE = "engine"  # another engine, which it left: that died, was quiet, or was to be restarted
    TRANSIT = "transit"  # nothing: it was being read and tokenised, or on its way to the scheduler
    OTHER = "other"  # the policy does not say


class Rejection(NamedTuple):
    """Why a request was turned away before its first token.

    `reason`: the objective that could not be kept, "ttft", "tpot" or "e2e". `predicted_ttft_s`: what it would have
    seen. `attainable_s`: the least value of that objective that could have been kept; None if nobody knows.
    """

    reason: str
    predicted_ttft_s: float
    cause: Cause = Cause.OTHER
    attainable_s: float | None = None

    @property
    def hopeless(self) -> bool:
        """Whether an idle machine would have turned it away as well."""
        return self.cause is Cause.IDLE
