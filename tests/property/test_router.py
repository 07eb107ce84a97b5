"""After any promises and placements, a client's view of each engine agrees with them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roseinfer.core.promise import DUE_S, Promise
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.breaker import AttemptOutcome
from roseinfer.router.placer import Placer
from roseinfer.router.registry import ROUTERS
from roseinfer.router.view import EngineView
from tests.helpers.cases import examples
from tests.router.promises import COST

BLOCKS = 64
ENGINES = st.integers(0, 3)
SHARES = st.floats(0.0, 1.5)


def keys_of(prefix: int, own: int, tokens: int) -> list[int]:
    """Return the keys of a prompt: its first six blocks are one of a few prefixes."""
    blocks = tokens // 16
    return [10 + 100 * prefix + b if b < 6 else 10_000 * (own + 1) + 100 * prefix + b for b in range(blocks)]


ASKS = st.builds(
    lambda tokens, prefix, own, keyed, output, ttft_s, tpot_s: RoutingRequest(
        tokens, keys_of(prefix, own, tokens) if keyed else (), 16, output, ttft_s, tpot_s
    ),
    st.integers(1, 400),
    st.integers(0, 2),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([0.0, 20.0, 400.0]),
    st.sampled_from([-0.1, 0.0, 0.2, 3.0, float("inf")]),
    st.sampled_from([0.02, 0.05, float("inf")]),
)


@dataclass
class Known:
    """Expected view of one engine."""

    promise: Promise | None = None
    sent: list[tuple[float, RoutingRequest, int]] = field(default_factory=list)
    up: bool = True

    @property
    def takes(self) -> bool:
        return self.up and not (self.promise and self.promise.draining)


class Books(RuleBasedStateMachine):
    @initialize(routing=st.sampled_from(ROUTERS), share=st.sampled_from([1, 4]), seed=st.integers(0, 9))
    def begin(self, routing: str, share: int, seed: int) -> None:
        self.placer = Placer(routing, range(4), share=share, blocks=BLOCKS, seed=seed)
        self.share = share
        self.known = [Known() for _ in range(4)]
        self.open: list[Placement] = []
        self.placed = 0
        self.now_s = 10.0

    @rule(engine=ENGINES, busy=SHARES, fill=st.integers(0, 5000), waiting=st.integers(0, 9), draining=st.booleans())
    def publish(self, engine: int, busy: float, fill: int, waiting: int, draining: bool) -> None:
        draining = draining and busy > 1
        due = (waiting * 50,) * len(DUE_S)
        blocks = 300 if waiting % 2 else 0
        news = Promise(
            self.now_s, 0.02, cost=COST, busy=busy, fill_tokens=fill, waiting_tokens=due, waiting=waiting,
            smallest_s=0.03 if busy else float("inf"), draining=draining, free_blocks=max(0, blocks - waiting * 30),
            growth_blocks=waiting * 10, blocks=blocks,
        )  # fmt: skip
        self.placer.update(engine, news)
        known = self.known[engine]
        known.promise = news
        known.sent = [sent for sent in known.sent if sent[0] > news.at_s]

    @rule(seconds=st.sampled_from([0.001, 0.02, 1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(ask=ASKS, but=st.lists(ENGINES, max_size=3))
    def place(self, ask: RoutingRequest, but: Sequence[int]) -> None:
        self._see(self.placer.place(ask, self.now_s, but), ask, but, must=True)

    @rule(ask=ASKS, but=st.lists(ENGINES, max_size=3))
    def retry(self, ask: RoutingRequest, but: Sequence[int]) -> None:
        found = self.placer.place_retry(ask, self.now_s, but)
        assert found is None or found.forecast.meets_objectives
        self._see(found, ask, but, must=False)

    def _see(self, found: Placement | None, ask: RoutingRequest, but: Sequence[int], *, must: bool) -> None:
        possible = [e for e, known in enumerate(self.known) if known.takes and e not in but]
        if found is None:
            assert not must or all(self.placer.is_breaker_open(engine) for engine in possible)
            return
        assert found.engine in possible and found.request is ask
        self.placed += 1
        assert found.number == self.placed
        assert 0 <= found.forecast.cached_tokens <= ask.prompt_tokens
        self.known[found.engine].sent.append((self.now_s, ask, found.forecast.cached_tokens))
        self.open.append(found)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 1000), cached=st.integers(0, 400), outcome=st.sampled_from([*AttemptOutcome, None]))
    def end(self, which: int, cached: int, outcome: AttemptOutcome | None) -> None:
        """End a request. `None`: it has its first token; others: why it ended without one."""
        placement = self.open.pop(which % len(self.open))
        if outcome is None:
            self.placer.on_first_token(placement, min(cached, placement.request.prompt_tokens))
        else:
            self.placer.on_unprefilled(placement)
        self.placer.report(placement.engine, outcome or AttemptOutcome.ANSWERED, self.now_s)

    @rule(engine=ENGINES, up=st.booleans())
    def up(self, engine: int, up: bool) -> None:
        self.placer.set_available(engine, up)
        self.known[engine].up = up

    @rule(engine=ENGINES)
    def forget(self, engine: int) -> None:
        self.placer.reset(engine)
        self.known[engine] = Known(up=self.known[engine].up)
        assert not self.placer.is_breaker_open(engine)

    @invariant()
    def books_are_right(self) -> None:
        """Check the view of an engine: its last promise, and the requests sent since."""
        if not hasattr(self, "placer"):
            return
        for engine, known in enumerate(self.known):
            view, fresh = self.placer.views[engine], EngineView(engine, BLOCKS, self.share, 0.0)
            if known.promise is not None:
                fresh.update(known.promise)
            for at_s, ask, cached in known.sent:
                fresh.on_sent(ask, cached, at_s)
            assert view.load == fresh.load and view.best_effort == fresh.best_effort
            assert view.utilisation == pytest.approx(fresh.utilisation)
            for left_s in (0.01, 0.3, float("inf")):
                ask = RoutingRequest(100, ttft_left_s=left_s, tpot_s=0.04)
                seen, right = view.forecast(ask, self.now_s, 0), fresh.forecast(ask, self.now_s, 0)
                assert seen == pytest.approx(right)

    @invariant()
    def memory_is_bounded(self) -> None:
        """Check that memory is bounded by the engine's blocks and the last prompt."""
        if hasattr(self, "placer"):
            assert all(len(view.prefixes) <= 1.25 * BLOCKS + 25 for view in self.placer.views.values())


TestBooks = Books.TestCase
TestBooks.settings = settings(examples(150), stateful_step_count=40)
