"""What one process knows of one engine: its last promise, what was sent there since, and what its cache may hold."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from math import inf
from typing import NamedTuple

from roseinfer.core.promise import DUE_S, Promise
from roseinfer.router.base import SHORTEST_S, Ask, Outlook
from roseinfer.router.breaker import Breaker
from roseinfer.router.prefixes import HeldPrefixes

LEAST_PROMPT_SHARE = 0.13  # of the machine, which prompts get whatever else it does
LEAST_KEEP = 0.05
STAYS = 0.5  # of the tokens that are expected, those that are there at once: requests end while others grow
PROMPT_SHARE, RECENT_S = 0.35, 10.0  # what engines take for the share of prompts at most, and over which time
MOST_SENT = 1024  # that are kept apart: an engine from which nothing is heard must not fill the memory
UNHEARD = Promise(at_s=0.0)


class Sent(NamedTuple):
    """What was sent at `at_s`: so many requests by all processes (each sample is one), `tokens` of prompts that are due
    at `due_s`, and what they weigh. `best_effort`: how many of them were promised nothing. `blocks`: of the KV cache
    that they will take.
    """

    at_s: float
    requests: int
    tokens: int
    due_s: float
    weight: float
    tpot_s: float
    best_effort: int
    blocks: float

    def with_one(self, other: "Sent") -> "Sent":
        return Sent(
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
    """One engine, as a `Candidate`. What does not depend on a request is computed when a promise comes, and kept up
    with what is sent.

    `blocks`: of its KV cache. `share`: how many processes send requests there as this one does; each sees only its own,
    and takes it that the others send as much. `delay_s`: how long a request takes to the engine. `takes`: whether it is
    there, and takes requests.
    """

    __slots__ = (
        "_arriving",
        "_base",
        "_block_share",
        "_blocks",
        "_busy",
        "_context_s",
        "_delay_s",
        "_ends_s",
        "_from_s",
        "_held",
        "_keep",
        "_needed",
        "_others",
        "_outputs",
        "_queues",
        "_row_s",
        "_running",
        "_seat_share",
        "_seated",
        "_sent",
        "_share",
        "_smallest_s",
        "_step_s",
        "_token_s",
        "_up",
        "_waiting",
        "best_effort",
        "breaker",
        "engine",
        "load",
        "prefixes",
        "priced",
        "promise",
        "takes",
        "utilisation",
    )

    def __init__(self, engine: int, blocks: int, share: int, delay_s: float) -> None:
        self.engine = engine
        self._blocks, self._share, self._delay_s = blocks, share, delay_s
        self._up = True
        self.forget()

    def forget(self) -> None:
        """Another one takes its place, of which nothing is known."""
        self.promise: Promise | None = None
        self.prefixes = HeldPrefixes(self._blocks)
        self.breaker = Breaker()
        self._sent: deque[Sent] = deque()
        self._recount(UNHEARD)
        self.takes = self._up

    # --- what happens -------------------------------------------------------------------------------------------
    def update(self, promise: Promise) -> None:
        """The engine's newest promise: it counts what was sent before it was made."""
        self.promise = promise
        sent, heard_s = self._sent, promise.at_s - self._delay_s
        while sent and sent[0].at_s <= heard_s:
            sent.popleft()
        self._recount(promise)
        self.takes = self._up and not promise.draining

    def set_up(self, up: bool) -> None:
        """Whether the engine is there."""
        self._up = up
        self.takes = up and not (self.promise is not None and self.promise.draining)

    def send(self, ask: Ask, cached_tokens: int, now_s: float) -> None:
        """A request goes there."""
        share = self._share
        outputs = ask.output_tokens or self._outputs
        left_s, tpot_s = ask.needs(outputs)
        tpot_s = max(tpot_s, self._step_s)  # nobody gets a faster pace: who asks for it is refused
        weight = (self._row_s + self._context_s * (ask.prompt_tokens + outputs / 2)) / tpot_s
        tokens = share * max(0, ask.prompt_tokens - cached_tokens)
        rows, outputs = share * ask.samples, outputs * ask.samples
        best_effort = 0 if ask.promised else rows
        blocks = (tokens + share * STAYS * outputs) / ask.block_size
        one = Sent(now_s, rows, tokens, now_s + left_s, rows * weight, tpot_s, best_effort, blocks)
        sent = self._sent
        if len(sent) >= MOST_SENT:
            sent[-1] = sent[-1].with_one(one)
        else:
            sent.append(one)
        self._count(one)
        self._sum_up()
        if ask.keys:
            held = cached_tokens // ask.block_size
            others = share * (outputs / ask.block_size) + (share - 1) * (len(ask.keys) - held)
            self.prefixes.use(ask.keys, others)
        self.breaker.sent(now_s)

    def started(self, ask: Ask, thought: int, cached_tokens: int) -> None:
        """A request's first token came: `cached_tokens` of its prompt were there, and not `thought`."""
        if ask.keys:
            self.prefixes.taken(self._share * (thought - cached_tokens) / ask.block_size)

    def unstarted(self, ask: Ask, thought: int) -> None:
        """A request ended before its prompt was computed: what it would have brought is not there."""
        if ask.keys:
            self.prefixes.drop(ask.keys[thought // ask.block_size :])

    def _recount(self, promise: Promise) -> None:
        _, self._token_s, self._row_s, self._context_s = promise.cost_s
        self._step_s = promise.constant_s
        self.priced = promise.cost_s[0] > 0
        self._from_s, self._ends_s = promise.at_s, promise.at_s + promise.step_s
        self._keep = max(promise.keep, LEAST_KEEP)
        self._smallest_s, self._busy = promise.smallest_s, promise.busy
        self._base = promise.busy + promise.weights
        self._arriving = promise.arriving
        self._queues = list(accumulate(promise.waiting_tokens, initial=promise.fill_tokens))[1:]
        self._outputs = promise.output_tokens
        self._block_share = 1 / promise.blocks if promise.blocks else 0.0
        self._held = (promise.blocks - promise.free_blocks + STAYS * promise.growth_blocks) * self._block_share
        self._waiting, self._running = promise.waiting, promise.running
        self._seat_share = 1 / (promise.running + promise.free_seats) if promise.free_seats or promise.running else 0.0
        self.best_effort = promise.best_effort
        for one in self._sent:
            self._count(one)
        self._sum_up()

    def _count(self, sent: Sent) -> None:
        """What the promise does not know of yet."""
        self._base += sent.weight
        # As the engine will count it: otherwise one that has published looks fuller than one that has not.
        self._arriving = max(self._arriving, min(PROMPT_SHARE, self._arriving + sent.tokens * self._token_s / RECENT_S))
        self._held += sent.blocks * self._block_share
        self._waiting += sent.requests
        self.best_effort += sent.best_effort
        if sent.tpot_s < self._smallest_s:
            self._smallest_s = sent.tpot_s
        queues = self._queues
        for bucket in range(bisect_left(DUE_S, sent.due_s - self._from_s), len(queues)):
            queues[bucket] += sent.tokens

    def _sum_up(self) -> None:
        self.load = self._waiting, self._running
        self._others = self._step_s / self._smallest_s
        self._needed = self._base + self._arriving
        self._seated = (self._running + self._waiting) * self._seat_share
        self.utilisation = max((self._others + self._needed) / self._keep, self._held, self._seated)

    # --- what it looks like -------------------------------------------------------------------------------------
    def held_tokens(self, ask: Ask, guess: int = 0) -> int:
        keys, size = ask.keys, ask.block_size
        return self.prefixes.held(keys, guess // size) * size if keys else 0

    def outlook(self, ask: Ask, now_s: float, cached_tokens: int) -> Outlook:
        """With S the smallest TPOT objective there, its own included, and c what a step costs whatever it holds:

        TTFT = what is left of the step + (prompt tokens that fill or are due before it + its own) / rate + c,
        rate = max(keep - c / S - busy, .13) / seconds a prompt token,
        utilisation = (c / S + what all others and itself need) / keep, or of its KV blocks or seats if that is more.
        """
        prompt, _, block_size, outputs, left_s, tpot_s, end_s, samples = ask
        outputs = outputs or self._outputs
        step_s, others = self._step_s, self._others
        if end_s < inf or tpot_s < SHORTEST_S:
            left_s, tpot_s = ask.needs(outputs)
        constant = step_s / tpot_s if tpot_s < self._smallest_s else others
        share = self._keep - constant - self._busy
        if share < LEAST_PROMPT_SHARE:
            share = LEAST_PROMPT_SHARE
        ahead = self._queues[bisect_left(DUE_S, now_s - self._from_s + left_s)]
        ttft_s = step_s + (ahead + prompt - cached_tokens) * self._token_s / share
        if self._ends_s > now_s:
            ttft_s += self._ends_s - now_s
        weight = samples * (self._row_s + self._context_s * (prompt + outputs / 2)) / tpot_s
        utilisation = (constant + self._needed + weight) / self._keep
        held = self._held + (prompt - cached_tokens + STAYS * samples * outputs) / block_size * self._block_share
        if held > utilisation:
            utilisation = held
        seats = self._seated + samples * self._seat_share
        if seats > utilisation:
            utilisation = seats
        late_s = ttft_s - left_s if ttft_s > left_s else 0.0
        extra = constant - others if others else 0.0  # else nobody is there to pay for its pace
        return Outlook(self.engine, ttft_s, late_s, utilisation, extra, cached_tokens)

    def idle_keeps(self, ask: Ask) -> bool:
        """Whether it could keep the request's objectives if it had nothing else to do."""
        left_s, tpot_s = ask.needs(ask.output_tokens or self._outputs)
        step_s = self._step_s + ask.samples * (self._row_s + self._context_s * ask.prompt_tokens)
        return self._step_s + self._token_s * ask.prompt_tokens <= left_s and step_s <= tpot_s
