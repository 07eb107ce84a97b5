"""Types of the router: the request it places, the forecast of an engine and the placement."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

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
