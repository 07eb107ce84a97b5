"""What a router is asked, what it answers, and what a way of choosing is."""

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import NamedTuple, Protocol

from roseinfer.core.promise import Promise

# The utilisation up to which an engine is believed to keep what it promises: it holds back a part of its time for
# requests that are more urgent or cheaper, and is not sure of the rest.
ROOM = 0.85
SHORTEST_S = 1e-6  # beyond which an objective is as good as at it


class Ask(NamedTuple):
    """What a router is told of a request.

    `prompt_tokens`; `keys`: of the prompt's full KV blocks, chained, 8 bytes each as an integer, the first block first;
    `block_size`: tokens of such a block. `output_tokens`: expected; 0 = unknown. `ttft_left_s`: how much is left of its
    TTFT objective, `tpot_s`: its TPOT objective, `end_left_s`: how much is left of the one for the whole request; inf =
    none. `samples`: outputs that are wanted of the prompt, each as long and as fast as that.
    """

    prompt_tokens: int
    keys: Sequence[int] = ()
    block_size: int = 16
    output_tokens: float = 0.0
    ttft_left_s: float = inf
    tpot_s: float = inf
    end_left_s: float = inf
    samples: int = 1

    @property
    def promised(self) -> bool:
        """Whether it has objectives."""
        return self.ttft_left_s < inf or self.tpot_s < inf or self.end_left_s < inf

    def needs(self, output_tokens: float) -> tuple[float, float]:
        """Seconds to its first token, and between two, that all of its objectives ask for, if its output has so many.

        Of the time for the whole request a tenth is the prompt's, and outputs may be half as long again.
        """
        left_s, tpot_s = self.ttft_left_s, self.tpot_s
        if self.end_left_s < inf:
            left_s = min(left_s, 0.1 * self.end_left_s)
            tpot_s = min(tpot_s, 0.9 * self.end_left_s / max(1.0, 1.5 * output_tokens))
        return left_s, max(tpot_s, SHORTEST_S)


class Outlook(NamedTuple):
    """What an engine is expected to do for a request. `late_s`: beyond its TTFT objective; `utilisation`: of the
    engine's time with it, or of its KV blocks if that is more, 1 = full; `extra`: the part of the time that the others
    there pay because it needs a faster pace than they do. `cached_tokens` of its prompt are thought to be there.
    """

    engine: int
    ttft_s: float = 0.0
    late_s: float = 0.0
    utilisation: float = 0.0
    extra: float = 0.0
    cached_tokens: int = 0

    @property
    def keeps(self) -> bool:
        """Whether its objectives would be kept."""
        return self.late_s <= 0 and self.utilisation <= ROOM


class Placement(NamedTuple):
    """Where a request goes. `number`: this placement's, among those of the process. `reason`: why, in a word for
    metrics and logs. `ask`: for what.
    """

    number: int
    engine: int
    reason: str
    outlook: Outlook
    ask: Ask


class Candidate(Protocol):
    """An engine that takes requests, as a way of choosing sees it. `promise` is None before its first."""

    @property
    def engine(self) -> int: ...

    @property
    def promise(self) -> Promise | None: ...

    @property
    def priced(self) -> bool:
        """Whether its promise says what steps cost there; without that an outlook says nothing."""
        ...

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait and that run there, with what this process has placed since the promise."""
        ...

    @property
    def best_effort(self) -> int:
        """Of those that wait, how many were promised nothing."""
        ...

    @property
    def utilisation(self) -> float:
        """Of the engine's time, or of its KV blocks if that is more, by what it has now; 1 = full."""
        ...

    def outlook(self, ask: Ask, now_s: float, cached_tokens: int) -> Outlook: ...

    def held_tokens(self, ask: Ask, guess: int = 0) -> int:
        """How many of its prompt tokens are thought to be in the prefix cache. `guess`: as many as another engine has,
        which is where to look first.
        """
        ...


class Routing(Protocol):
    """A way of choosing: one file each, registered by name."""

    def choose(self, ask: Ask, candidates: Sequence[Candidate], now_s: float) -> tuple[Candidate, str]:
        """One of the candidates (there is at least one), and why."""
        ...


# How one is made, with a generator for what is left to chance.
MakeRouting = Callable[[Random], Routing]
