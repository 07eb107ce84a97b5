"""Types of the router: the request it places, the forecast of an engine, the placement and the policy protocol."""

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import NamedTuple, Protocol

from roseinfer.core.promise import Promise

# Utilisation up to which a forecast is trusted: an engine reserves time for more urgent or cheaper requests.
MAX_TRUSTED_SHARE = 0.85
MIN_TPOT_S = 1e-6  # lower bound on objectives, which are divisors


class RoutingRequest(NamedTuple):
    """Request as the router sees it.

    `keys`: of the prompt's full KV blocks in order, chained, each an 8-byte integer; `block_size`: tokens per block.
    `output_tokens`: expected length, 0 if unknown. `ttft_left_s` and `end_left_s`: time left until the deadlines of the
    first token and of the whole request; `tpot_s`: the TPOT objective; inf = no objective. `samples`: outputs per
    prompt; each has the expected length and the TPOT objective. `adapter`: key of its LoRA adapter, 0 = none;
    `adapter_bytes`: the size of that.
    """

    prompt_tokens: int
    keys: Sequence[int] = ()
    block_size: int = 16
    output_tokens: float = 0.0
    ttft_left_s: float = inf
    tpot_s: float = inf
    end_left_s: float = inf
    samples: int = 1
    adapter: int = 0
    adapter_bytes: int = 0

    @property
    def has_objectives(self) -> bool:
        return self.ttft_left_s < inf or self.tpot_s < inf or self.end_left_s < inf

    def required_latency(self, output_tokens: float) -> tuple[float, float]:
        """Return the TTFT and TPOT, in seconds, that meet all objectives with an output of `output_tokens`.

        A tenth of the time for the whole request is reserved for the prompt, and half of the output length for a wrong
        estimate.
        """
        left_s, tpot_s = self.ttft_left_s, self.tpot_s
        if self.end_left_s < inf:
            left_s = min(left_s, 0.1 * self.end_left_s)
            tpot_s = min(tpot_s, 0.9 * self.end_left_s / max(1.0, 1.5 * output_tokens))
        return left_s, max(tpot_s, MIN_TPOT_S)


class EngineForecast(NamedTuple):
    """Expected service of one request by one engine.

    `late_s`: expected TTFT beyond its deadline. `utilisation`: with the request, of the engine's time, KV blocks or
    seats, whichever is highest; 1 = full. `pace_cost`: share of the engine's time that its other requests pay because
    this one needs a shorter TPOT. `cached_tokens`: prompt tokens expected in the engine's prefix cache.
    """

    engine: int
    ttft_s: float = 0.0
    late_s: float = 0.0
    utilisation: float = 0.0
    pace_cost: float = 0.0
    cached_tokens: int = 0

    @property
    def meets_objectives(self) -> bool:
        return self.late_s <= 0 and self.utilisation <= MAX_TRUSTED_SHARE


class Placement(NamedTuple):
    """Decision of the router. `number`: unique in the process. `reason`: one word for metrics and logs."""

    number: int
    engine: int
    reason: str
    forecast: EngineForecast
    request: RoutingRequest


class Candidate(Protocol):
    """Engine that accepts requests. `promise` is None until the first one arrives."""

    @property
    def engine(self) -> int: ...

    @property
    def promise(self) -> Promise | None: ...

    @property
    def priced(self) -> bool:
        """True if the promise includes step costs. Without costs a forecast means nothing."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """Waiting and running requests, including those placed by this process since the promise."""
        ...

    @property
    def pace_s(self) -> float:
        """Tightest TPOT objective of its requests, in seconds; inf without any."""
        ...

    @property
    def best_effort(self) -> int:
        """Number of waiting requests without objectives."""
        ...

    @property
    def utilisation(self) -> float:
        """Current utilisation of the engine's time, KV blocks or seats, whichever is highest; 1 = full."""
        ...

    def holds_adapter(self, request: RoutingRequest) -> bool:
        """True if the request's LoRA adapter is in a slot, or comes to one because of an earlier request."""
        ...

    def forecast(self, request: RoutingRequest, now_s: float, cached_tokens: int) -> EngineForecast: ...

    def cached_tokens(self, request: RoutingRequest, guess: int = 0) -> int:
        """Return how many prompt tokens the prefix cache is expected to hold. The search starts at `guess`."""
        ...


class RoutingPolicy(Protocol):
    """Way to choose an engine. Each policy has a file and a name in the registry."""

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> tuple[Candidate, str]:
        """Return one of the candidates (at least one is given) and the reason."""
        ...


# The generator makes random choices.
RoutingPolicyFactory = Callable[[Random], RoutingPolicy]
