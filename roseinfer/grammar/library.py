"""The grammar library, llguidance, as the rest of roseinfer sees it: tokens, compiled grammars, matchers.

No other file imports it. It releases the GIL while it compiles and while it computes masks. It never raises for what a
grammar does: a matcher enters an error state in which its masks quietly allow the end alone. Here that is an exception.
"""

import math
import os
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from time import perf_counter
from typing import TypeVar

import llguidance
from llguidance import gbnf_to_lark as llguidance_gbnf
from orjson import dumps

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.grammar.faster import Faster
from roseinfer.text.tokenizer import DecoderKind, Tokenizer

PARALLEL_FROM = 16  # masks; fewer are not worth waking anybody
MOST_THREADS = 8
MASKS_PER_LOOK = 4  # between two looks at the clock, which take as long as a quarter of the cheapest masks
MAX_MASKS_PER_THREAD = 16
LONGEST_WAY = 256  # tokens that a matcher repeats to change its lane: a third of a millisecond
MESSAGE_LENGTH = 500
# Of the library's own limits those that bound one mask, and what a grammar remembers. With its defaults (50,000, 2,000
# and 250,000) a mask of an ambiguous grammar takes up to 35 ms, and the states of a regex up to 180 MB. All 563 schemas
# of MaskBench do as well with these (docs/structured-outputs.md).
MAX_STEP_ITEMS = 20_000
MAX_ROW_ITEMS = 1_000
MAX_LEXER_STATES = 100_000
_PATTERN_FUEL = 1_000

T = TypeVar("T")


class GrammarError(InvalidRequestError):
    """A grammar that does not compile, or that no output satisfies."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_grammar") -> None:
        super().__init__(message, param, code)


class UnsupportedTokenizerError(InvalidRequestError):
    """The model's tokenizer is of a kind that grammars cannot be matched with."""

    def __init__(self, why: str) -> None:
        message = f"outputs of this model cannot be constrained: {why}"
        super().__init__(message, None, "unsupported_tokenizer")


class MatcherError(RoseinferError):
    """A matcher was told a token that its grammar forbids, or used up what one mask may cost."""


class GrammarTokens:
    """A model's vocabulary as grammars see it: the bytes of every token, and which tokens end an output."""

    def __init__(self, raw: llguidance.LLTokenizer, vocab_size: int) -> None:
        self.raw = raw
        self.vocab_size = vocab_size
        self.eos_ids = tuple(raw.eos_tokens)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> "GrammarTokens":
        """`vocab_size`: the model's, at least the tokenizer's. `eos_ids`: all tokens that end an output.

        Takes about 0.4 s for 150,000 tokens. Raises `UnsupportedTokenizerError`.
        """
        if tokenizer.kind is DecoderKind.TEXT:
            raise UnsupportedTokenizerError("the tokenizer's tokens are not pieces of its text")
        if not eos_ids:
            raise UnsupportedTokenizerError("the model has no token that ends an output")
        if max(eos_ids) >= vocab_size:
            raise UnsupportedTokenizerError("the token that ends an output is outside the vocabulary")
        beyond = max(eos_ids) >= tokenizer.vocab_size
        source = llguidance.TokenizerWrapper(_Spelt(tokenizer, vocab_size, eos_ids)) if beyond else None
        try:
            raw = llguidance.LLTokenizer(
                source or tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_ids)
            )
        except BaseException as error:
            raise UnsupportedTokenizerError(_message(_library_error(error))) from error
        return cls(raw, vocab_size)

    def spelling(self, token_id: int) -> bytes:
        """What the token adds to a text; special tokens as written."""
        return self.raw.decode_bytes([token_id])

    def spell(self, text: bytes) -> list[int]:
        """Tokens that add up to `text`, none of them special."""
        return self.raw.tokenize_bytes(text)


class _Spelt:
    """A tokenizer spelt out for the library, where tokens that end an output are none of the tokenizer's own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.eos_token_id = min(eos_ids)
        self.bos_token_id = None
        known = tokenizer.vocab_size
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        for token in eos_ids:
            self.tokens[token] = self.tokens[token] or f"<[{token}]>".encode()
        self.special_token_ids = sorted(tokenizer.special_ids.union(eos_ids))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


class Matcher:
    """Follows one output through a grammar. Not thread safe. `lane`: masks of one lane cannot be computed at once.

    `first`: the mask behind no token at all, which is the grammar's; None once a token was consumed.
    """

    __slots__ = ("_grammar", "_said", "first", "lane", "raw")

    def __init__(self, grammar: "Grammar") -> None:
        self._grammar = grammar
        self.raw, self.lane = grammar.start()
        self.first: bytes | None = grammar.first
        # What it was told, while there may be a better lane to go to and the way there is short.
        self._said: list[int] | None = None if grammar.wide else []

    def consume(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens. Raises `MatcherError` for one that the grammar forbids, or behind its end."""
        self.first = None
        self._grammar.masks += len(token_ids)
        consume = self.raw.consume_token
        for token_id in token_ids:
            if not consume(token_id):
                raise self.failure()
        if self._said is not None:
            self._said += token_ids
            if len(self._said) > LONGEST_WAY:
                self._said = None

    def spread(self) -> None:
        """Go to a lane with more room, if the grammar has lanes by now that it had not at the start."""
        if self._said is None or not self._grammar.wide:
            return
        raw, lane = self._grammar.start()
        if lane != self.lane and raw.consume_tokens(self._said):
            self.raw, self.lane = raw, lane
        self._said = None

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Whether the grammar goes on with these tokens; nothing is taken."""
        return self.raw.validate_tokens(list(token_ids)) == len(token_ids)

    def fill(self, words: memoryview) -> None:
        """Write which tokens may come next into all of a line of `TokenMasks`. Raises `MatcherError`."""
        if self.first is not None:
            _copy(self.first, words, 0)
            return
        self.raw.unsafe_compute_mask_ptr(addressof(c_char.from_buffer(words)), words.nbytes)
        if self.raw.is_error():
            raise self.failure()

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""
        return self.raw.is_accepting()

    @property
    def halted(self) -> bool:
        """Complete, or failed."""
        return self.raw.is_stopped()

    @property
    def complete(self) -> bool:
        """Nothing may follow but the end of the output. A mask may be what finds it out."""
        return self.raw.is_stopped() and not self.raw.is_error()

    def failure(self) -> MatcherError:
        self._grammar.is_spent = True
        return MatcherError(_message(self.raw.get_error()))

    @property
    def failed(self) -> bool:
        return self.raw.is_error()


class Grammar:
    """A compiled grammar. `text`: what it was compiled from. `first`: the first mask, a line of `TokenMasks` as bytes.
    `wide`: it has all lanes that it will have. `is_spent`: an output has failed, perhaps at the limit of states, which
    all outputs of the grammar share: those to come need another one.

    What the library finds out about a grammar while masks are computed is kept by the compiled grammar, behind a lock
    that all its matchers share. So masks of one grammar would be computed one by one, whatever the threads. Where that
    matters it is compiled several times: into lanes, among which matchers are shared out.
    """

    def __init__(self, proved: llguidance.LLMatcher, text: str, first: bytes) -> None:
        self.text = text
        self.first = first
        self.wide = False
        self.users = 0  # for whoever counts them
        self.masks = 0  # computed for its outputs, about
        self.is_spent = False
        self._next = 0
        self._lanes = [proved]

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def widen(self, others: Sequence["Grammar"]) -> None:
        """Add those compiled from the same text as lanes; there will be no more. Safe while others start matchers."""
        self._lanes = [*self._lanes, *(lane for other in others for lane in other._lanes)]
        self.wide = True

    def start(self) -> tuple[llguidance.LLMatcher, int]:
        """The library's matcher at the start of an output, and its lane: each gets the next one."""
        lanes = self._lanes
        lane = lanes[self._next % len(lanes)]
        self._next += 1
        return lane.deep_copy(), id(lane)

    def warnings(self) -> list[str]:
        """What lenient schemas of the grammar say that is not enforced, in the library's words."""
        return list(self._lanes[0].get_grammar_warnings())

    def matcher(self) -> Matcher:
        """A matcher at the start of an output: microseconds, a tenth of a millisecond for the largest grammars."""
        return Matcher(self)


def compile_grammar(text: str, tokens: GrammarTokens) -> Grammar:
    """Compile a grammar, in the library's own serialised form or in Lark, and prove that an output can begin.

    The latter finds grammars whose rules never end, which compile. Raises `GrammarError` with what the library says.
    """
    # Fuel for lexers stays at the library's default: half of it gives up schemas that are served well. The process that
    # proves grammars bounds their size, by its time and memory.
    limits = llguidance.LLParserLimits(
        step_max_items=MAX_STEP_ITEMS,
        max_items_in_row=MAX_ROW_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    matcher = _guarded(lambda: llguidance.LLMatcher(tokens.raw, text, log_level=0, limits=limits))
    first = b"" if matcher.is_error() else _guarded(matcher.compute_bitmask)
    if matcher.is_error():
        raise GrammarError(_message(matcher.get_error()) or "no output satisfies the grammar")
    # The library leaves room for one token more than there are.
    return Grammar(matcher, text, first[: 4 * -(-tokens.vocab_size // 32)])


class MaskThreads:
    """Computes the masks of many matchers at once, on threads where that is faster.

    It depends on the machine and on the grammars: masks take 5 us to 2 ms, and waking threads up as much. So it is
    found out. `threads`: None = as many as may help.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = min(len(os.sched_getaffinity(0)) // 2, MOST_THREADS) if threads is None else threads
        self._executor = llguidance.LLExecutor(self.threads) if self.threads > 1 else None
        self._faster = Faster()

    def fill(
        self, matchers: Sequence[Matcher], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        """Write the masks of the first matchers to their lines of `words`. Return how many, at least 1.

        Few masks are begun after `until_s`, on the clock of `perf_counter`. `threads` False: on this thread alone.
        Matchers that fail in this report it themselves.
        """
        count = len(matchers)
        if self._executor is None or count < PARALLEL_FROM or not threads:
            return self._fill_one_by_one(matchers, words, until_s)
        way = self._faster.choose(count)
        began_s = perf_counter()
        done = (self._fill_on_threads if way else self._fill_one_by_one)(matchers, words, until_s)
        self._faster.note(way, done, perf_counter() - began_s)
        return done

    def _fill_one_by_one(self, matchers: Sequence[Matcher], words: memoryview, until_s: float = math.inf) -> int:
        line, start = words.nbytes // len(matchers), addressof(c_char.from_buffer(words))
        for i, matcher in enumerate(matchers):
            if matcher.first is None:
                matcher.raw.unsafe_compute_mask_ptr(start + i * line, line)
                if i % MASKS_PER_LOOK == 0 and perf_counter() > until_s:
                    return i + 1
            else:
                _copy(matcher.first, words, i)
        return len(matchers)

    def _fill_on_threads(self, matchers: Sequence[Matcher], words: memoryview, until_s: float = math.inf) -> int:
        """In chunks, as the library computes all that it gets."""
        assert self._executor is not None
        line, start = words.nbytes // len(matchers), addressof(c_char.from_buffer(words))
        chunk = self.threads * MAX_MASKS_PER_THREAD
        done = 0
        while done < len(matchers):
            stop = min(done + chunk, len(matchers))
            for i in range(done, stop):
                matchers[i].spread()
            # A thread takes neighbours: those of one lane, as far as possible.
            order = sorted(range(done, stop), key=lambda i: matchers[i].lane)
            work = [(matchers[i].raw, i) for i in order if matchers[i].first is None]
            if work:  # the library takes no empty list
                self._executor.unsafe_compute_mask_ptr(work, start, line, len(matchers))
            for i in range(done, stop):
                first = matchers[i].first
                if first is not None:
                    _copy(first, words, i)
            done = stop
            if perf_counter() > until_s:
                break
        return done


def _copy(line: bytes, words: memoryview, number: int) -> None:
    """Write a line of masks."""
    words.cast("B")[number * len(line) : (number + 1) * len(line)] = line


def _guarded(call: Callable[[], T]) -> T:
    """What `call` returns. Whatever the library raises, its panics too, is about the grammar."""
    try:
        return call()
    except BaseException as error:
        raise GrammarError(_message(_library_error(error))) from error


def _library_error(error: BaseException) -> str:
    """What an exception of the library says. Panics are no `Exception`s; what ends the process is not the library's."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        raise error
    return str(error) or type(error).__name__


def _message(text: str) -> str:
    """The library's words without what it adds for its developers."""
    return text.replace("<non-verbose/>", "").strip()[:MESSAGE_LENGTH]


def gbnf_to_lark(text: str) -> str:
    """A grammar in GBNF, llama.cpp's notation, as one in Lark. Raises `GrammarError` with what is wrong."""
    return _guarded(lambda: llguidance_gbnf.gbnf_to_lark(text))


def pattern_fault(pattern: str) -> str | None:
    """Return why the library does not support a `pattern` of a JSON schema, None if it does.

    Takes 0.1 ms, a few milliseconds for 8 kB: what else compiling would find out is left for then.
    """
    schema = dumps({"type": "string", "pattern": pattern}).decode()
    limits = llguidance.LLParserLimits(initial_lexer_fuel=_PATTERN_FUEL, verbose_errors=False)
    try:
        said = llguidance.LLMatcher.validate_grammar('{"grammars":[{"json_schema":' + schema + "}]}", limits=limits)
    except BaseException as error:
        said = _library_error(error)
    if "lookarounds not supported" in said:
        return "look-around is not supported"
    if "regex parse error" not in said:
        return None
    return _message(said).rpartition("error: ")[2]


def slashes_escaped(pattern: str) -> str:
    """A regex as it stands between the slashes of Lark."""
    return llguidance.regex_to_lark(pattern)
