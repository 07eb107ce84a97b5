"""Compiled grammars of an engine: compiled on threads of their own, shared by requests, kept while there is room."""

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
from roseinfer.engine.guided.constraints import Vocabulary, grammars_of, make_guide, token_ids_of
from roseinfer.engine.guided.guides import Guide, MaskSource
from roseinfer.grammar.library import Grammar, GrammarTokens, MaskThreads, Matcher, compile_grammar
from roseinfer.grammar.memory import GrammarMemory, estimate_memory

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
MOST_GRAMMARS = 1024
COMPILERS = 2
HITS_BEFORE_TRIM = 16  # grammars also grow while no others come
WIDEST_SHARE = 0.25  # of the room, for the lanes of one grammar
MAX_GROWN_SHARE = 0.25  # of the room, for what one grammar has grown by: then it is compiled anew
# How long a request waits for its grammars. The library bounds what one costs; this is for a machine that stands still.
PATIENCE_S = 10.0


class GrammarCache:
    """Grammar texts to compiled grammars; those not used for longest go first.

    `tokens`: called on a thread, once, by whoever needs it first; what it raises, compiling raises. `lanes`: those of a
    grammar that several outputs follow.
    """

    def __init__(
        self,
        tokens: Callable[[], GrammarTokens],
        *,
        most_bytes: int = MOST_BYTES,
        most_grammars: int = MOST_GRAMMARS,
        compilers: int = COMPILERS,
        lanes: int = 1,
    ) -> None:
        self._pool = ThreadPoolExecutor(compilers, "roseinfer-grammar")
        self._wideners = ThreadPoolExecutor(1, "roseinfer-lanes")
        self._lanes = lanes
        self.most_bytes = most_bytes
        self._most_grammars = most_grammars
        self._grammars: OrderedDict[bytes, _Kept] = OrderedDict()
        self._news = threading.Event()
        self.tokens: Future[GrammarTokens] = self._pool.submit(tokens)
        self.compiled = self.cached = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def grammar(self, text: str, memory: tuple[int, int] | None = None) -> Future[Grammar]:
        """The compiled grammar, at once or some time later. It fails with `InvalidRequestError`, and is forgotten.

        `memory`: what it takes, if that was measured.
        """
        key = hashlib.sha256(text.encode()).digest()
        known = self._grammars.get(key)
        if known is not None and known.usable(MAX_GROWN_SHARE * self.most_bytes):
            self._grammars.move_to_end(key)
            self.cached += 1
            if self.cached % HITS_BEFORE_TRIM == 0:
                self._trim()
            return known.future
        if known is not None:
            del self._grammars[key]
        future = self._pool.submit(self._compile, text)
        future.add_done_callback(lambda _: self._news.set())
        self._keep(key, _Kept(future, estimate_memory(text) if memory is None else GrammarMemory(*memory)))
        self.compiled += 1
        return future

    def _compile(self, text: str) -> Grammar:
        return compile_grammar(text, self.tokens.result())

    def widen(self, grammar: Grammar) -> None:
        """Begin to give a grammar its lanes, unless they are too large to be kept. To be called once for each."""
        key = hashlib.sha256(grammar.text.encode()).digest()
        known = self._grammars.get(key)
        more = (self._lanes - 1) * known.taken_bytes if known else 0
        if not 0 < more <= WIDEST_SHARE * self.most_bytes:
            grammar.widen([])
            return
        assert known is not None
        known.lanes = self._lanes
        self._wideners.submit(self._add_lanes, grammar)
        self._keep(key, known)

    def _add_lanes(self, grammar: Grammar) -> None:
        try:
            grammar.widen([self._compile(grammar.text) for _ in range(self._lanes - 1)])
        except Exception:
            log.exception("a grammar that had been compiled could not be compiled again")
            grammar.widen([])

    @property
    def taken_bytes(self) -> int:
        """Bytes that all grammars take now."""
        return sum(kept.taken_bytes for kept in self._grammars.values())

    def _keep(self, key: bytes, kept: "_Kept") -> None:
        """Make `kept` the newest."""
        self._grammars[key] = kept
        self._grammars.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        """Forget the oldest grammars while there is no room."""
        total = self.taken_bytes
        while len(self._grammars) > 1 and (total > self.most_bytes or len(self._grammars) > self._most_grammars):
            _, oldest = self._grammars.popitem(last=False)
            total -= oldest.taken_bytes

    def wait(self, timeout_s: float) -> None:
        """Until a grammar has been compiled since the last call, or so long."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        for pool in (self._pool, self._wideners):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Kept:
    """A grammar on the shelf. `memory` is that of each of its lanes."""

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
    """`GuideFactory` by grammars. See `GuideFactory` for what the methods do."""

    def __init__(self, tokens: Callable[[], GrammarTokens], vocab_size: int, *, threads: int | None = None) -> None:
        self._threads = MaskThreads(threads)
        self.cache = GrammarCache(tokens, lanes=max(1, self._threads.threads))
        self._vocabulary = Vocabulary(vocab_size, self.cache.tokens)
        self.refused = 0

    def prepare(self, spec: GuideSpec) -> "PendingGrammarGuide":
        size = self._vocabulary.size
        if any(not 0 <= token < size for token in token_ids_of(spec)):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {size}", "guide")
        return PendingGrammarGuide(spec, [self.cache.grammar(text, spec.memory) for text in grammars_of(spec)], self)

    def guide(self, spec: GuideSpec, grammars: Sequence[Grammar]) -> Guide:
        for grammar in grammars:
            grammar.users += 1
            if grammar.users == 2:  # from now on masks may be in each other's way
                self.cache.widen(grammar)
        return make_guide(spec, grammars, self._vocabulary)

    def fill(
        self, sources: Sequence[MaskSource], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        return self._threads.fill(cast(Sequence[Matcher], sources), words, until_s, threads=threads)

    def wait(self, timeout_s: float) -> None:
        self.cache.wait(timeout_s)

    def stats(self) -> GuideStats:
        shelf = self.cache
        return GuideStats(shelf.compiled, shelf.cached, self.refused, grammars=len(shelf))

    def close(self) -> None:
        """Compile nothing more. GuideFactory that were made go on."""
        self.cache.close()


class PendingGrammarGuide:
    """The grammars of one request, perhaps still being compiled. See `PendingGuide`."""

    def __init__(self, spec: GuideSpec, grammars: Sequence[Future[Grammar]], guides: GrammarGuideFactory) -> None:
        self._spec = spec
        self._grammars = grammars
        self._guides = guides
        self._until_s = monotonic() + PATIENCE_S

    @property
    def ready(self) -> bool:
        return all(grammar.done() for grammar in self._grammars) or monotonic() > self._until_s

    def make(self) -> Guide:
        try:
            if not all(grammar.done() for grammar in self._grammars):
                message = f"the grammar could not be compiled in {PATIENCE_S:.0f} s"
                raise InvalidRequestError(message, "guide", "grammar_too_complex")
            return self._guides.guide(self._spec, [grammar.result() for grammar in self._grammars])
        except InvalidRequestError:
            self._guides.refused += 1
            raise
