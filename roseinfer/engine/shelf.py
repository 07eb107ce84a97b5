"""Compiled grammars of an engine: compiled on threads of their own, shared by requests, kept while there is room."""

import hashlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import cast

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats
from roseinfer.engine.constraints import Vocabulary, grammars_of, make_guide, token_ids_of
from roseinfer.engine.guides import Guide, MaskSource
from roseinfer.grammar.library import Grammar, GrammarTokens, MaskThreads, Matcher, compile_grammar

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
MOST_GRAMMARS = 1024
COMPILERS = 2
WIDEST_SHARE = 0.25  # of the room, for the lanes of one grammar
# What a compiled grammar takes: measured over 216 JSON schemas of up to 180 kB, as a line through 0 and the mean.
_GRAMMAR_BYTES = 32 << 10
_BYTES_PER_BYTE = 48
# How long a request waits for its grammars. The library bounds what one costs; this is for a machine that stands still.
PATIENCE_S = 10.0


class Shelf:
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
        self._most_bytes = most_bytes
        self._most_grammars = most_grammars
        self._grammars: OrderedDict[bytes, tuple[Future[Grammar], int]] = OrderedDict()
        self._bytes = 0
        self._news = threading.Event()
        self.tokens: Future[GrammarTokens] = self._pool.submit(tokens)
        self.compiled = self.cached = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def grammar(self, text: str) -> Future[Grammar]:
        """The compiled grammar, at once or some time later. It fails with `InvalidRequestError`, and is forgotten."""
        key = hashlib.sha256(text.encode()).digest()
        known = self._grammars.get(key)
        if known is not None and not (known[0].done() and known[0].exception() is not None):
            self._grammars.move_to_end(key)
            self.cached += 1
            return known[0]
        if known is not None:
            self._forget(key)
        future = self._pool.submit(self._compile, text)
        future.add_done_callback(lambda _: self._news.set())
        self._keep(key, future, _GRAMMAR_BYTES + _BYTES_PER_BYTE * len(text))
        self.compiled += 1
        return future

    def _compile(self, text: str) -> Grammar:
        return compile_grammar(text, self.tokens.result())

    def widen(self, grammar: Grammar) -> None:
        """Begin to give a grammar its lanes, unless they are too large to be kept. To be called once for each."""
        key = hashlib.sha256(grammar.text.encode()).digest()
        known = self._grammars.get(key)
        more = (self._lanes - 1) * known[1] if known else 0
        if not 0 < more <= WIDEST_SHARE * self._most_bytes:
            grammar.widen([])
            return
        assert known is not None
        del self._grammars[key]
        self._bytes -= known[1]
        self._wideners.submit(self._add_lanes, grammar)
        self._keep(key, known[0], known[1] + more)

    def _add_lanes(self, grammar: Grammar) -> None:
        try:
            grammar.widen([self._compile(grammar.text) for _ in range(self._lanes - 1)])
        except Exception:
            log.exception("a grammar that had been compiled could not be compiled again")
            grammar.widen([])

    def _keep(self, key: bytes, future: Future[Grammar], size: int) -> None:
        self._grammars[key] = (future, size)
        self._bytes += size
        while len(self._grammars) > 1 and (self._bytes > self._most_bytes or len(self._grammars) > self._most_grammars):
            self._forget(next(iter(self._grammars)))

    def _forget(self, key: bytes) -> None:
        _, size = self._grammars.pop(key)
        self._bytes -= size

    def wait(self, timeout_s: float) -> None:
        """Until a grammar has been compiled since the last call, or so long."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        for pool in (self._pool, self._wideners):
            pool.shutdown(wait=False, cancel_futures=True)


class GrammarGuides:
    """`Guides` by grammars. See `Guides` for what the methods do."""

    def __init__(self, tokens: Callable[[], GrammarTokens], vocab_size: int, *, threads: int | None = None) -> None:
        self._threads = MaskThreads(threads)
        self._shelf = Shelf(tokens, lanes=max(1, self._threads.threads))
        self._vocabulary = Vocabulary(vocab_size, self._shelf.tokens)
        self.refused = 0

    def blueprint(self, spec: GuideSpec) -> "GrammarBlueprint":
        size = self._vocabulary.size
        if any(not 0 <= token < size for token in token_ids_of(spec)):
            raise InvalidRequestError(f"a token id is outside the vocabulary of {size}", "guide")
        return GrammarBlueprint(spec, [self._shelf.grammar(text) for text in grammars_of(spec)], self)

    def guide(self, spec: GuideSpec, grammars: Sequence[Grammar]) -> Guide:
        for grammar in grammars:
            grammar.users += 1
            if grammar.users == 2:  # from now on masks may be in each other's way
                self._shelf.widen(grammar)
        return make_guide(spec, grammars, self._vocabulary)

    def fill(
        self, sources: Sequence[MaskSource], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        return self._threads.fill(cast(Sequence[Matcher], sources), words, until_s, threads=threads)

    def wait(self, timeout_s: float) -> None:
        self._shelf.wait(timeout_s)

    def stats(self) -> GuideStats:
        shelf = self._shelf
        return GuideStats(shelf.compiled, shelf.cached, self.refused, grammars=len(shelf))

    def close(self) -> None:
        """Compile nothing more. Guides that were made go on."""
        self._shelf.close()


class GrammarBlueprint:
    """The grammars of one request, perhaps still being compiled. See `Blueprint`."""

    def __init__(self, spec: GuideSpec, grammars: Sequence[Future[Grammar]], guides: GrammarGuides) -> None:
        self._spec = spec
        self._grammars = grammars
        self._guides = guides
        self._until_s = monotonic() + PATIENCE_S

    @property
    def ready(self) -> bool:
        return all(grammar.done() for grammar in self._grammars) or monotonic() > self._until_s

    def guide(self) -> Guide:
        try:
            if not all(grammar.done() for grammar in self._grammars):
                message = f"the grammar could not be compiled in {PATIENCE_S:.0f} s"
                raise InvalidRequestError(message, "guide", "grammar_too_complex")
            return self._guides.guide(self._spec, [grammar.result() for grammar in self._grammars])
        except InvalidRequestError:
            self._guides.refused += 1
            raise
