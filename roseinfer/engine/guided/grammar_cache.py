"""Cache of compiled grammars of an engine, shared by its requests. Grammars are compiled in threads of their own."""

import hashlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import cast

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats
from roseinfer.engine.guided.constraints import grammars_of, make_guide, token_ids_of
from roseinfer.engine.guided.guide import Guide, MaskSource
from roseinfer.engine.guided.vocabulary import Vocabulary
from roseinfer.grammar.library import Grammar, GrammarTokens, MaskThreads, Matcher, compile_grammar
from roseinfer.grammar.memory import GrammarMemory, estimate_memory

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 64 << 20
MAX_GRAMMARS = 1024
COMPILER_COUNT = 2
MAX_HITS_BEFORE_TRIM = 16  # grammars also grow without new ones
MAX_LANES_SHARE = 0.25  # of the cache, for the lanes of one grammar
MAX_GROWN_SHARE = 0.25  # of the cache, for the growth of one grammar: above it, the grammar is compiled again
# Timeout of a request's compilations. The library limits their cost, so it applies only to a stalled machine.
COMPILE_TIMEOUT_S = 10.0


class GrammarCache:
    """Compiled grammars by text. The least recently used are dropped first.

    `tokens`: called once, in a thread; its errors are raised by every compilation. `lanes`: copies of a grammar for
    parallel masks, once several outputs use it.
    """

    def __init__(
        self,
        tokens: Callable[[], GrammarTokens],
        *,
        max_bytes: int = MAX_CACHE_BYTES,
        max_grammars: int = MAX_GRAMMARS,
        lanes: int = 1,
    ) -> None:
        self._pool = ThreadPoolExecutor(COMPILER_COUNT, "roseinfer-grammar")
        self._lane_pool = ThreadPoolExecutor(1, "roseinfer-lanes")
        self._lanes = lanes
        self.max_bytes = max_bytes
        self._max_grammars = max_grammars
        self._grammars: OrderedDict[bytes, _CacheEntry] = OrderedDict()
        self._any_compiled = threading.Event()
        self.tokens: Future[GrammarTokens] = self._pool.submit(tokens)
        self.compiled = self.cached = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def grammar(self, text: str, memory: tuple[int, int] | None = None) -> Future[Grammar]:
        """Return the compiled grammar as a future. A future that fails with `InvalidRequestError` is not cached.

        `memory`: size of the grammar, if it has been measured.
        """
        key = hashlib.sha256(text.encode()).digest()
        entry = self._grammars.get(key)
        if entry is not None and entry.usable(MAX_GROWN_SHARE * self.max_bytes):
            self._grammars.move_to_end(key)
            self.cached += 1
            if self.cached % MAX_HITS_BEFORE_TRIM == 0:
                self._trim()
            return entry.future
        if entry is not None:
            del self._grammars[key]
        future = self._pool.submit(self._compile, text)
        future.add_done_callback(lambda _: self._any_compiled.set())
        self._store(key, _CacheEntry(future, estimate_memory(text) if memory is None else GrammarMemory(*memory)))
        self.compiled += 1
        return future

    def _compile(self, text: str) -> Grammar:
        return compile_grammar(text, self.tokens.result())

    def widen(self, grammar: Grammar) -> None:
        """Start compiling the lanes of a grammar, unless they are too large for the cache. Called once per grammar."""
        key = hashlib.sha256(grammar.text.encode()).digest()
        entry = self._grammars.get(key)
        more = (self._lanes - 1) * entry.taken_bytes if entry else 0
        if not 0 < more <= MAX_LANES_SHARE * self.max_bytes:
            grammar.widen([])
            return
        assert entry is not None
        entry.lanes = self._lanes
        self._lane_pool.submit(self._add_lanes, grammar)
        self._store(key, entry)

    def _add_lanes(self, grammar: Grammar) -> None:
        try:
            grammar.widen([self._compile(grammar.text) for _ in range(self._lanes - 1)])
        except Exception:
            log.exception("cannot compile more lanes of a grammar")
            grammar.widen([])

    @property
    def taken_bytes(self) -> int:
        """Return the present size of all grammars in bytes."""
        return sum(entry.taken_bytes for entry in self._grammars.values())

    def _store(self, key: bytes, entry: "_CacheEntry") -> None:
        """Add `entry` as the most recently used."""
        self._grammars[key] = entry
        self._grammars.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        """Drop the least recently used grammars until the rest fits."""
        total = self.taken_bytes
        while len(self._grammars) > 1 and (total > self.max_bytes or len(self._grammars) > self._max_grammars):
            _, oldest = self._grammars.popitem(last=False)
            total -= oldest.taken_bytes

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until a grammar has been compiled since the last call."""
        self._any_compiled.wait(timeout_s)
        self._any_compiled.clear()

    def close(self) -> None:
        for pool in (self._pool, self._lane_pool):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _CacheEntry:
    """Cached grammar. `memory`: of each of its lanes."""

    future: Future[Grammar]
    memory: GrammarMemory
    lanes: int = 1

    @property
    def taken_bytes(self) -> int:
        return self.memory.after(self._masks, self.lanes)

    def usable(self, max_growth: float) -> bool:
        """True if later outputs can use it: it compiles, has not failed, and has not grown beyond `max_growth`."""
        if not self.future.done():
            return True
        if self.future.exception() is not None or self.future.result().is_spent:
            return False
        return self.memory.grown(self._masks, self.lanes) <= max_growth

    @property
    def _masks(self) -> int:
        is_there = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result().masks if is_there else 0


class GrammarGuideFactory:
    """`GuideFactory` that compiles grammars."""

    def __init__(self, tokens: Callable[[], GrammarTokens], vocab_size: int, *, threads: int | None = None) -> None:
        self._threads = MaskThreads(threads)
        self.cache = GrammarCache(tokens, lanes=max(1, self._threads.threads))
        self._vocabulary = Vocabulary(vocab_size, self.cache.tokens)
        self.refused = 0

    def prepare(self, spec: GuideSpec) -> "PendingGrammarGuide":
        size = self._vocabulary.size
        if any(not 0 <= token < size for token in token_ids_of(spec)):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {size}")
        return PendingGrammarGuide(spec, [self.cache.grammar(text, spec.memory) for text in grammars_of(spec)], self)

    def guide(self, spec: GuideSpec, grammars: Sequence[Grammar]) -> Guide:
        for grammar in grammars:
            grammar.users += 1
            if grammar.users == 2:  # from now on, two masks of it may be computed at once
                self.cache.widen(grammar)
        return make_guide(spec, grammars, self._vocabulary)

    def fill(
        self, sources: Sequence[MaskSource], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        return self._threads.fill(cast(Sequence[Matcher], sources), words, until_s, threads=threads)

    def wait(self, timeout_s: float) -> None:
        self.cache.wait(timeout_s)

    def stats(self) -> GuideStats:
        cache = self.cache
        return GuideStats(cache.compiled, cache.cached, self.refused, grammars=len(cache))

    def close(self) -> None:
        """Stop compiling. Existing guides stay usable."""
        self.cache.close()


class PendingGrammarGuide:
    """Grammars of one request, perhaps still being compiled. See `PendingGuide`."""

    def __init__(self, spec: GuideSpec, grammars: Sequence[Future[Grammar]], guides: GrammarGuideFactory) -> None:
        self._spec = spec
        self._grammars = grammars
        self._guides = guides
        self._deadline_s = monotonic() + COMPILE_TIMEOUT_S

    @property
    def ready(self) -> bool:
        return all(grammar.done() for grammar in self._grammars) or monotonic() > self._deadline_s

    def make(self) -> Guide:
        try:
            if not all(grammar.done() for grammar in self._grammars):
                message = f"the grammar did not compile within {COMPILE_TIMEOUT_S:.0f} s"
                raise InvalidRequestError(message, code="grammar_too_complex")
            return self._guides.guide(self._spec, [grammar.result() for grammar in self._grammars])
        except InvalidRequestError:
            self._guides.refused += 1
            raise
