"""Latency objectives of a request, and why it waited, ran late or was rejected."""

from dataclasses import dataclass, replace
from enum import StrEnum
from numbers import Real
from sys import float_info
from typing import NamedTuple

from roseinfer.core.errors import InvalidRequestError

# Names in reports: of requests without objectives, and of objectives that the client set.
NO_CLASS, CUSTOM_CLASS = "none", "custom"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives in seconds; None = no objective.

    `ttft_s`: from arrival to the first token. `tpot_s`: (last token - first token) / (tokens - 1), so early tokens may
    compensate for late ones. `e2e_s`: from arrival to the last token. `class_name` groups requests in reports.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    class_name: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            real = isinstance(value, Real) and value is not True
            if not (value is None or (real and 0 < value <= float_info.max)):
                raise InvalidRequestError(f"{name} must be a positive, finite number, got {value!r}", f"slo.{name}")
            object.__setattr__(self, name, value and float(value))  # other numbers cannot be sent

    @property
    def empty(self) -> bool:
        """True without any objective: best effort."""
        return self.ttft_s is None and self.tpot_s is None and self.e2e_s is None

    def for_output(self, max_tokens: int) -> "Slo | None":
        """Return what an output of at most `max_tokens` can miss, None for nothing: a single token has no TPOT."""
        kept = self if max_tokens > 1 or self.tpot_s is None else replace(self, tpot_s=None)
        return None if kept.empty else kept

    def missed(self, ttft_s: float, tpot_s: float, e2e_s: float) -> list[str]:
        """Return which of "ttft", "tpot" and "e2e" a finished request missed. `tpot_s` is 0 for a single token."""
        pairs = (("ttft", ttft_s, self.ttft_s), ("tpot", tpot_s, self.tpot_s), ("e2e", e2e_s, self.e2e_s))
        return [name for name, seen, promised in pairs if promised is not None and seen > promised]


class Cause(StrEnum):
    """Cause of a wait, or of a rejection: then it is what the request waited for last.

    `IDLE` occurs only in rejections; `LOAD`, `PARENT`, `GRAMMAR` and `ENGINE` only in waits.
    """

    IDLE = "idle"  # nothing: not even an idle machine could meet its objective
    PRICE = "price"  # overload, and it is more work than the requests that are served
    PACE = "pace"  # overload, and the short steps it needs would displace too many other requests
    QUEUE = "queue"  # the prompts before its own
    UTILISATION = "utilisation"  # running requests, which together with it would miss token deadlines
    BLOCKS = "blocks"  # free KV blocks
    LOAD = "load"  # K/V of its prefix, being loaded from host memory
    SEATS = "seats"  # a free seat (`max_num_seqs`)
    SLOTS = "slots"  # a free slot for its recurrent state
    ADAPTER = "adapter"  # its LoRA adapter: a free slot, or its weights, being loaded
    STEP = "step"  # the end of the step that ran when it arrived: requests start between steps
    BUDGET = "prompt_budget"  # prompt tokens of a step
    TENANT = "tenant"  # its tenant has used more than its share
    PARENT = "parent"  # sample 0 of the same request, which computes the prompt for all samples
    GRAMMAR = "grammar"  # the compilation of its grammar
    ENGINE = "engine"  # another engine, which it left: that rejected it, crashed, stopped responding or was drained
    TRANSIT = "transit"  # nothing: it was being read and tokenised, or on its way to the scheduler
    OTHER = "other"  # the policy gives no cause


class Rejection(NamedTuple):
    """Reason to reject a request before its first token.

    `reason`: the objective that was out of reach, "ttft", "tpot" or "e2e". `predicted_ttft_s`: expected time to first
    token. `attainable_s`: smallest value of that objective that could have been met; None = unknown.
    """

    reason: str
    predicted_ttft_s: float
    cause: Cause = Cause.OTHER
    attainable_s: float | None = None

    @property
    def hopeless(self) -> bool:
        """True if an idle machine would have rejected it as well."""
        return self.cause is Cause.IDLE


SUGGESTED_MARGIN_SHARE = 0.05  # added to an attainable objective, so that it still holds a moment later


def suggested_ms(attainable_ms: float) -> float:
    """Round an attainable objective up to two digits, with a margin. Messages give this number."""
    digits = 1.0
    while attainable_ms / digits >= 100:
        digits *= 10
    while attainable_ms / digits < 10:
        digits /= 10
    return round((int(attainable_ms * (1 + SUGGESTED_MARGIN_SHARE) / digits) + 1) * digits, 6)


class Forecast(NamedTuple):
    """Expectation of a policy before a request started; None: no expectation.

    `ttft_s`: seconds from arrival to the first token. `tpot_s`: seconds per further token.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None


class Why(NamedTuple):
    """Explanation of a sequence's latency: its waits by cause, and how it ran.

    `waited`: seconds without a seat by cause, longest first. Time before the request was sent to this engine counts as
    `Cause.TRANSIT` or, if another engine had it, as `Cause.ENGINE`. `chunks`: rows that computed prompt tokens,
    including rows of several tokens after a preemption. `steps`: steps planned while it had a seat, up to its last
    token. `sat_out`: those of them in which it computed nothing. `prefill_s`: seconds up to its first token in which a
    step computed it.
    """

    waited: tuple[tuple[Cause, float], ...] = ()
    forecast: Forecast = Forecast()
    chunks: int = 0
    steps: int = 0
    sat_out: int = 0
    prefill_s: float = 0.0
