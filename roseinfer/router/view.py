"""State of one engine as one process knows it: its last promise, requests sent since, and its likely cache."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import inf
from typing import NamedTuple

from roseinfer.core.promise import DUE_S, Promise
from roseinfer.router.base import MIN_TPOT_S, EngineForecast, RoutingRequest
from roseinfer.router.breaker import Breaker
from roseinfer.router.prefixes import CachedPrefixes

MIN_PROMPT_SHARE = 0.13  # of the engine's time, which prompts always get
MIN_USABLE_SHARE = 0.05
RESIDENT_SHARE = (
    0.5  # of the expected output tokens that are in the KV cache at one time: requests end while others grow
)
MAX_PROMPT_SHARE, PROMPT_WINDOW_S = 0.35, 10.0  # engines' upper bound on `arriving`, and its averaging time
MAX_SENT_COUNT = 1024  # entries; later ones are merged, so that a silent engine does not fill the memory
_NO_PROMISE = Promise(at_s=0.0)


class SentRequests(NamedTuple):
    """Requests sent at `at_s` that the last promise does not include; each sample counts as one request.

    `tokens`: uncached prompt tokens, due at `due_s`. `weight`: share of the engine's time that their TPOT objectives
    need. `best_effort`: requests without objectives. `blocks`: KV blocks they will use.
    """

    at_s: float
    requests: int
    tokens: int
    due_s: float
    weight: float
    tpot_s: float
    best_effort: int
    blocks: float

    def merged(self, other: "SentRequests") -> "SentRequests":
        return SentRequests(
            other.at_s,
            self.requests + other.requests,
            self.tokens + other.tokens,
            min(self.due_s, other.due_s),
            self.weight + other.weight,
            min(self.tpot_s, other.tpot_s),
            self.best_effort + other.best_effort,
            self.blocks + other.blocks,
        )


class EngineView:
    """State of one engine, from which routing policies choose.

    Values that do not depend on a request are computed once per promise and updated with each request sent. `promise`:
    None until the first one arrives. `priced`: the promise includes step costs; without them a forecast means nothing.
    `load`: waiting and running requests. `pace_s`: tightest TPOT objective of its requests, inf without any.
    `best_effort`: number of waiting requests without objectives. `utilisation`: of the engine's time, KV blocks or
    seats, whichever is highest; 1 = full.

    `blocks`: of its KV cache. `share`: number of processes that send requests to it; each sees only its own requests
    and assumes that the others send as many. `delay_s`: time until the engine has read a request.
    """

    __slots__ = (
        "_arriving",
        "_available",
        "_base",
        "_block_share",
        "_blocks",
        "_busy",
        "_coming_s",
        "_context_s",
        "_current_pace",
        "_delay_s",
        "_ends_s",
        "_from_s",
        "_held",
        "_keep",
        "_needed",
        "_outputs",
        "_queues",
        "_row_s",
        "_running",
        "_seat_share",
        "_seated",
        "_sent",
        "_share",
        "_step_s",
        "_token_s",
        "_waiting",
        "accepts_requests",
        "best_effort",
        "breaker",
        "engine",
        "load",
        "pace_s",
        "prefixes",
        "priced",
        "promise",
        "utilisation",
    )

    def __init__(self, engine: int, blocks: int, share: int, delay_s: float) -> None:
        self.engine = engine
        self._blocks, self._share, self._delay_s = blocks, share, delay_s
        self._available = True
        self.reset()

    def reset(self) -> None:
        """Forget everything but availability: the engine was restarted."""
        self.promise: Promise | None = None
        self.prefixes = CachedPrefixes(self._blocks)
        self.breaker = Breaker()
        self._sent: deque[SentRequests] = deque()
        self._coming_s: dict[int, float] = {}  # when adapters can be used that requests since the promise need
        self._recount(_NO_PROMISE)
        self.accepts_requests = self._available

    # --- events -------------------------------------------------------------------------------------------------
    def update(self, promise: Promise) -> None:
        """Store the newest promise. It includes the requests that the engine had read by then."""
        self.promise = promise
        sent, read_s = self._sent, promise.at_s - self._delay_s
        while sent and sent[0].at_s <= read_s:
            sent.popleft()
        self._recount(promise)
        if self._coming_s:
            here = promise.device_adapters
            self._coming_s = {key: at_s for key, at_s in self._coming_s.items() if at_s > read_s and key not in here}
        self.accepts_requests = self._available and not promise.draining

    def set_available(self, available: bool) -> None:
        self._available = available
        self.accepts_requests = available and not (self.promise is not None and self.promise.draining)

    def on_sent(self, request: RoutingRequest, cached_tokens: int, now_s: float) -> None:
        share = self._share
        outputs = request.output_tokens or self._outputs
        left_s, tpot_s = request.required_latency(outputs)
        tpot_s = max(tpot_s, self._step_s)  # the engine rejects a shorter one
        weight = (self._row_s + self._context_s * (request.prompt_tokens + outputs / 2)) / tpot_s
        tokens = share * max(0, request.prompt_tokens - cached_tokens)
        rows, outputs = share * request.samples, outputs * request.samples
        best_effort = 0 if request.has_objectives else rows
        blocks = (tokens + share * RESIDENT_SHARE * outputs) / request.block_size
        one = SentRequests(now_s, rows, tokens, now_s + left_s, rows * weight, tpot_s, best_effort, blocks)
        sent = self._sent
        if len(sent) >= MAX_SENT_COUNT:
            sent[-1] = sent[-1].merged(one)
        else:
            sent.append(one)
        self._count(one)
        self._update_totals()
        if request.adapter:
            self._coming_s[request.adapter] = now_s + self._adapter_s(request, now_s)
        if request.keys:
            cached_blocks = cached_tokens // request.block_size
            other_blocks = share * (outputs / request.block_size) + (share - 1) * (len(request.keys) - cached_blocks)
            self.prefixes.use(request.keys, other_blocks)
        self.breaker.on_sent(now_s)

    def on_first_token(self, request: RoutingRequest, expected: int, cached_tokens: int) -> None:
        """Correct the model of the cache: `cached_tokens` of the prompt were cached instead of `expected`."""
        if request.keys:
            self.prefixes.add_other_blocks(self._share * (expected - cached_tokens) / request.block_size)

    def on_unprefilled(self, request: RoutingRequest, expected: int) -> None:
        """Remove the blocks of a request that ended before its prompt was computed."""
        if request.keys:
            self.prefixes.remove(request.keys[expected // request.block_size :])

    def _recount(self, promise: Promise) -> None:
        _, self._token_s, self._row_s, self._context_s, _ = promise.cost
        self._step_s = promise.constant_s
        self.priced = promise.cost.step_s > 0
        self._from_s, self._ends_s = promise.at_s, promise.at_s + promise.step_s
        self._keep = max(promise.usable_share, MIN_USABLE_SHARE)
        self.pace_s, self._busy = promise.smallest_s, promise.busy
        self._base = promise.busy + promise.weights
        self._arriving = promise.arriving
        self._queues = list(accumulate(promise.waiting_tokens, initial=promise.fill_tokens))[1:]
        self._outputs = promise.output_tokens
        self._block_share = 1 / promise.blocks if promise.blocks else 0.0
        self._held = (promise.blocks - promise.free_blocks + RESIDENT_SHARE * promise.growth_blocks) * self._block_share
        self._waiting, self._running = promise.waiting, promise.running
        self._seat_share = 1 / (promise.running + promise.free_seats) if promise.free_seats or promise.running else 0.0
        self.best_effort = promise.best_effort
        for one in self._sent:
            self._count(one)
        self._update_totals()

    def _count(self, sent: SentRequests) -> None:
        """Add requests that the promise does not include."""
        self._base += sent.weight
        # Count like the engine; otherwise an engine that has published would look busier than one that has not.
        arriving = self._arriving + sent.tokens * self._token_s / PROMPT_WINDOW_S
        self._arriving = max(self._arriving, min(MAX_PROMPT_SHARE, arriving))
        self._held += sent.blocks * self._block_share
        self._waiting += sent.requests
        self.best_effort += sent.best_effort
        if sent.tpot_s < self.pace_s:
            self.pace_s = sent.tpot_s
        queues = self._queues
        for bucket in range(bisect_left(DUE_S, sent.due_s - self._from_s), len(queues)):
            queues[bucket] += sent.tokens

    def _update_totals(self) -> None:
        self.load = self._waiting, self._running
        self._current_pace = self._step_s / self.pace_s
        self._needed = self._base + self._arriving
        self._seated = (self._running + self._waiting) * self._seat_share
        self.utilisation = max((self._current_pace + self._needed) / self._keep, self._held, self._seated)

    # --- state --------------------------------------------------------------------------------------------------
    @property
    def own_waiting(self) -> int:
        """Number of waiting requests that this process sent if the others sent as many, as of the last promise."""
        return 0 if self.promise is None else -(-self.promise.waiting // self._share)

    # --- forecasts ----------------------------------------------------------------------------------------------
    def cached_tokens(self, request: RoutingRequest, guess: int = 0) -> int:
        """Return how many prompt tokens the prefix cache is expected to hold. The search starts at `guess`."""
        keys, size = request.keys, request.block_size
        return self.prefixes.cached_blocks(keys, guess // size) * size if keys else 0

    def forecast(self, request: RoutingRequest, now_s: float, cached_tokens: int) -> EngineForecast:
        """Forecast with S = the smallest TPOT objective including the request's, and c = the constant cost of a step:

        TTFT = rest of the current step + (prompt tokens in prefill or due earlier + its own) / rate + c
               + seconds until its adapter can be used,
        rate = max(keep - c / S - busy, MIN_PROMPT_SHARE) / seconds per prompt token,
        utilisation = (c / S + demand of all requests including this one) / keep, or that of KV blocks or seats if
        higher.
        """
        prompt, _, block_size, outputs, left_s, tpot_s, end_s, samples, adapter, _ = request
        outputs = outputs or self._outputs
        step_s, current_pace = self._step_s, self._current_pace
        if end_s < inf or tpot_s < MIN_TPOT_S:
            left_s, tpot_s = request.required_latency(outputs)
        constant = step_s / tpot_s if tpot_s < self.pace_s else current_pace
        share = self._keep - constant - self._busy
        if share < MIN_PROMPT_SHARE:
            share = MIN_PROMPT_SHARE
        ahead = self._queues[bisect_left(DUE_S, now_s - self._from_s + left_s)]
        ttft_s = step_s + (ahead + prompt - cached_tokens) * self._token_s / share
        if self._ends_s > now_s:
            ttft_s += self._ends_s - now_s
        if adapter:
            ttft_s += self._adapter_s(request, now_s)
        weight = samples * (self._row_s + self._context_s * (prompt + outputs / 2)) / tpot_s
        utilisation = (constant + self._needed + weight) / self._keep
        held = (
            self._held + (prompt - cached_tokens + RESIDENT_SHARE * samples * outputs) / block_size * self._block_share
        )
        if held > utilisation:
            utilisation = held
        seats = self._seated + samples * self._seat_share
        if seats > utilisation:
            utilisation = seats
        late_s = ttft_s - left_s if ttft_s > left_s else 0.0
        pace_cost = constant - current_pace if current_pace else 0.0  # without other requests none pays for its pace
        return EngineForecast(self.engine, ttft_s, late_s, utilisation, pace_cost, cached_tokens)

    def holds_adapter(self, request: RoutingRequest) -> bool:
        """True if the request's LoRA adapter is in a slot, or comes to one because of an earlier request."""
        key = request.adapter
        return key in self._coming_s or (self.promise is not None and key in self.promise.device_adapters)

    def _adapter_s(self, request: RoutingRequest, now_s: float) -> float:
        """Return the seconds until the request's adapter can be used, perhaps because of an earlier request for it."""
        key = request.adapter
        if key in self._coming_s:
            return max(0.0, self._coming_s[key] - now_s)
        return 0.0 if self.promise is None else self.promise.adapter_s(key, request.adapter_bytes)

    def attainable_when_idle(self, request: RoutingRequest) -> bool:
        """Return True if the engine would meet the objectives if it were idle."""
        left_s, tpot_s = request.required_latency(request.output_tokens or self._outputs)
        step_s = self._step_s + request.samples * (self._row_s + self._context_s * request.prompt_tokens)
        return self._step_s + self._token_s * request.prompt_tokens <= left_s and step_s <= tpot_s
