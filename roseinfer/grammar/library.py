"""Wrapper of llguidance, the grammar library: tokens, compiled grammars, matchers. No other file imports llguidance.

llguidance releases the GIL while it compiles and computes masks. It does not raise for a grammar's failures: a matcher
enters an error state, whose masks allow only the end of the output. This module raises an exception instead.
"""

import math
import os
from collections.abc import Callable, Sequence
from copy import copy
from ctypes import addressof, c_char
from time import perf_counter
from typing import TypeVar

import llguidance
from llguidance import gbnf_to_lark as llguidance_gbnf
from orjson import dumps

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.grammar.speed_choice import SpeedChoice
from roseinfer.text.tokenizer import DecoderKind, Tokenizer

MIN_PARALLEL_COUNT = 16  # masks: starting threads takes longer than fewer of them
MAX_THREADS = 8
CLOCK_CHECK_COUNT = 4  # masks between two reads of the clock, which takes a quarter of the cheapest mask
MAX_MASKS_PER_THREAD = 16
MAX_REPLAY_TOKENS = 256  # that a matcher repeats to change its lane, in a third of a millisecond
MAX_MESSAGE_CHARS = 500
# Limits of llguidance on one mask and on a grammar's cached states. With its defaults (50,000, 2,000 and 250,000) a
# mask of an ambiguous grammar takes up to 35 ms, and the states of a regex up to 180 MB. All 563 schemas of MaskBench
# have the same results with these (docs/how-to/structured-outputs.md).
MAX_STEP_ITEMS = 20_000
MAX_ROW_ITEMS = 1_000
MAX_LEXER_STATES = 100_000
_MAX_PATTERN_FUEL = 1_000

T = TypeVar("T")


class GrammarError(InvalidRequestError):
    """A grammar that does not compile, or that no output satisfies."""

    def __init__(self, message: str, code: str = "invalid_grammar") -> None:
        super().__init__(message, None, code)


class UnsupportedTokenizerError(InvalidRequestError):
    """The model's tokenizer does not support constrained outputs."""

    def __init__(self, why: str) -> None:
        message = f"outputs of this model cannot be constrained: {why}"
        super().__init__(message, None, "unsupported_tokenizer")


class MatcherError(RoseinferError):
    """A matcher was given a token that its grammar forbids, or a mask exceeded its limits."""


class GrammarTokens:
    """A model's vocabulary for grammars: the bytes of every token, and the tokens that end an output."""

    def __init__(self, raw: llguidance.LLTokenizer, vocab_size: int) -> None:
        self.raw = raw
        self.vocab_size = vocab_size
        self.eos_ids = tuple(raw.eos_tokens)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> "GrammarTokens":
        """Read a tokenizer, in about 0.4 s for 150,000 tokens. Raises `UnsupportedTokenizerError`.

        `vocab_size`: the model's, at least the tokenizer's. `eos_ids`: all tokens that end an output.
        """
        if tokenizer.kind is DecoderKind.TEXT:
            raise UnsupportedTokenizerError("the tokenizer's tokens are not pieces of its text")
        if not eos_ids:
            raise UnsupportedTokenizerError("the model has no token that ends an output")
        if max(eos_ids) >= vocab_size:
            raise UnsupportedTokenizerError("the token that ends an output is outside the vocabulary")
        beyond = max(eos_ids) >= tokenizer.vocab_size
        source = llguidance.TokenizerWrapper(_TokenTable(tokenizer, vocab_size, eos_ids)) if beyond else None
        try:
            raw = llguidance.LLTokenizer(
                source or tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_ids)
            )
        except BaseException as error:
            raise UnsupportedTokenizerError(_message(_library_error(error))) from error
        return cls(raw, vocab_size)

    def spelling(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text; special tokens as written."""
        return self.raw.decode_bytes([token_id])

    def spell(self, text: bytes) -> list[int]:
        """Return tokens that spell `text`, without special ones."""
        return self.raw.tokenize_bytes(text)


class _TokenTable:
    """A tokenizer as a table for llguidance, with `eos_ids` that are not the tokenizer's own."""

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
    """State of one output in a grammar. Not thread-safe.

    `lane`: see `Grammar`. `first`: the mask before the first token, which is the grammar's; None after that token.
    """

    __slots__ = ("_consumed", "first", "grammar", "lane", "raw")

    def __init__(self, grammar: "Grammar") -> None:
        self.grammar = grammar
        self.raw, self.lane = grammar.start()
        self.first: bytes | None = grammar.first
        # Tokens so far, while another lane may become available and few tokens have to be repeated.
        self._consumed: list[int] | None = None if grammar.wide else []

    def consume(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens. Raises `MatcherError` for a token that the grammar forbids, or after its end."""
        self.first = None
        consume = self.raw.consume_token
        for token_id in token_ids:
            if not consume(token_id):
                raise self.failure()
        if self._consumed is not None:
            self._consumed += token_ids
            if len(self._consumed) > MAX_REPLAY_TOKENS:
                self._consumed = None

    def fork(self) -> "Matcher":
        """Return an independent matcher in the same state, in microseconds."""
        fork = copy(self)
        fork.raw = self.raw.deep_copy()
        if self._consumed is not None:
            fork._consumed = [*self._consumed]
        return fork

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` next tokens, each of which is the only one that its mask allows.

        There may be more: llguidance leaves out the last ones where the text after them could change how it is split
        into tokens.
        """
        return self.raw.compute_ff_tokens()[:limit]

    def change_lane(self) -> None:
        """Move to another lane if the grammar has got more lanes since this matcher was made."""
        if self._consumed is None or not self.grammar.wide:
            return
        raw, lane = self.grammar.start()
        if lane != self.lane and raw.consume_tokens(self._consumed):
            self.raw, self.lane = raw, lane
        self._consumed = None

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Return True if these tokens may come next. The state does not change."""
        return self.raw.validate_tokens(list(token_ids)) == len(token_ids)

    def fill(self, words: memoryview) -> None:
        """Write which tokens may come next into a row of `TokenMasks`. Raises `MatcherError`."""
        if self.first is not None:
            _copy(self.first, words, 0)
            return
        self.grammar.masks += 1
        self.raw.unsafe_compute_mask_ptr(addressof(c_char.from_buffer(words)), words.nbytes)
        if self.raw.is_error():
            raise self.failure()

    @property
    def accepting(self) -> bool:
        """True if the output may end here."""
        return self.raw.is_accepting()

    @property
    def halted(self) -> bool:
        """True if the output is complete or has failed."""
        return self.raw.is_stopped()

    @property
    def complete(self) -> bool:
        """True if only the end of the output may follow. This may be known only after a mask was computed."""
        return self.raw.is_stopped() and not self.raw.is_error()

    def failure(self) -> MatcherError:
        self.grammar.is_spent = True
        return MatcherError(_message(self.raw.get_error()))

    @property
    def failed(self) -> bool:
        return self.raw.is_error()


class Grammar:
    """A compiled grammar.

    `text`: its source. `first`: the first mask, a row of `TokenMasks` as bytes. `wide`: it has all its lanes.
    `is_spent`: an output has failed, perhaps at the limit of states, which all outputs share; recompile the grammar.

    The states that masks discover are cached in the compiled grammar, under a lock that all its matchers share. So
    threads cannot compute masks of one compiled grammar in parallel. Where that matters, the grammar is compiled
    several times, into lanes, and each matcher uses one of them.
    """

    def __init__(self, proved: llguidance.LLMatcher, text: str, first: bytes) -> None:
        self.text = text
        self.first = first
        self.wide = False
        self.users = 0  # maintained by its users
        self.masks = 0  # computed so far
        self.is_spent = False
        self._next = 0
        self._lanes = [proved]

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def widen(self, others: Sequence["Grammar"]) -> None:
        """Add the final lanes, compiled from the same text. Safe while other threads start matchers."""
        self._lanes = [*self._lanes, *(lane for other in others for lane in other._lanes)]
        self.wide = True

    def start(self) -> tuple[llguidance.LLMatcher, int]:
        """Return llguidance's matcher at the start of an output, and its lane. Lanes take turns."""
        lanes = self._lanes
        lane = lanes[self._next % len(lanes)]
        self._next += 1
        return lane.deep_copy(), id(lane)

    def warnings(self) -> list[str]:
        """Return llguidance's messages about keywords of lenient schemas that are not enforced."""
        return list(self._lanes[0].get_grammar_warnings())

    def matcher(self) -> Matcher:
        """Return a matcher at the start of an output, in microseconds (0.1 ms for the largest grammars)."""
        return Matcher(self)


def compile_grammar(text: str, tokens: GrammarTokens) -> Grammar:
    """Compile a grammar, in llguidance's serialised form or in Lark. Raises `GrammarError` with llguidance's message.

    The first mask is computed, too, which finds grammars whose rules never end: those compile.
    """
    # Lexer fuel and grammar size keep llguidance's defaults: with half the fuel, outputs of valid schemas fail. The
    # prover process bounds the time and memory of compilation.
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
    # llguidance's mask has a bit for one more token.
    return Grammar(matcher, text, first[: 4 * -(-tokens.vocab_size // 32)])


class MaskThreads:
    """Thread pool for the masks of many matchers, used where it is faster than one thread.

    That depends on the machine and on the grammars, as masks take 5 us to 2 ms and so does waking a thread. So both
    are timed. `threads`: None = half of the cores, at most `MAX_THREADS`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = min(len(os.sched_getaffinity(0)) // 2, MAX_THREADS) if threads is None else threads
        self._executor = llguidance.LLExecutor(self.threads) if self.threads > 1 else None
        self._choice = SpeedChoice()

    def fill(
        self, matchers: Sequence[Matcher], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        """Write the masks of the first matchers to their rows of `words`. Return how many, at least 1.

        Few masks are started after `until_s`, a time of `perf_counter`. `threads` False: use this thread only.
        A matcher that fails has `failed` set.
        """
        count = len(matchers)
        if self._executor is None or count < MIN_PARALLEL_COUNT or not threads:
            return self._fill_one_by_one(matchers, words, until_s)
        option = self._choice.choose(count)
        began_s = perf_counter()
        done = (self._fill_on_threads if option else self._fill_one_by_one)(matchers, words, until_s)
        self._choice.record(option, done, perf_counter() - began_s)
        return done

    def _fill_one_by_one(self, matchers: Sequence[Matcher], words: memoryview, until_s: float = math.inf) -> int:
        line, start = words.nbytes // len(matchers), addressof(c_char.from_buffer(words))
        for i, matcher in enumerate(matchers):
            if matcher.first is None:
                matcher.grammar.masks += 1
                matcher.raw.unsafe_compute_mask_ptr(start + i * line, line)
                if i % CLOCK_CHECK_COUNT == 0 and perf_counter() > until_s:
                    return i + 1
            else:
                _copy(matcher.first, words, i)
        return len(matchers)

    def _fill_on_threads(self, matchers: Sequence[Matcher], words: memoryview, until_s: float = math.inf) -> int:
        """Fill masks in chunks, as llguidance does not return before all of its list are done."""
        assert self._executor is not None
        line, start = words.nbytes // len(matchers), addressof(c_char.from_buffer(words))
        chunk = self.threads * MAX_MASKS_PER_THREAD
        done = 0
        while done < len(matchers):
            stop = min(done + chunk, len(matchers))
            for i in range(done, stop):
                matchers[i].change_lane()
            # Sorted by lane, as a thread computes neighbours and masks of one lane exclude each other.
            order = sorted(range(done, stop), key=lambda i: matchers[i].lane)
            work = [(matchers[i].raw, i) for i in order if matchers[i].first is None]
            if work:  # llguidance rejects an empty list
                self._executor.unsafe_compute_mask_ptr(work, start, line, len(matchers))
            for i in range(done, stop):
                first = matchers[i].first
                if first is None:
                    matchers[i].grammar.masks += 1
                else:
                    _copy(first, words, i)
            done = stop
            if perf_counter() > until_s:
                break
        return done


def _copy(line: bytes, words: memoryview, number: int) -> None:
    """Write row `number` of masks."""
    words.cast("B")[number * len(line) : (number + 1) * len(line)] = line


def _guarded(call: Callable[[], T]) -> T:
    """Return the result of `call`. Raises `GrammarError` for any exception of llguidance, panics included."""
    try:
        return call()
    except BaseException as error:
        raise GrammarError(_message(_library_error(error))) from error


def _library_error(error: BaseException) -> str:
    """Return the message of an llguidance exception. Panics are not `Exception`s, so others are raised again."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        raise error
    return str(error) or type(error).__name__


def _message(text: str) -> str:
    """Return a message of llguidance without its notes for developers."""
    return text.replace("<non-verbose/>", "").strip()[:MAX_MESSAGE_CHARS]


def gbnf_to_lark(text: str) -> str:
    """Translate a grammar in GBNF, llama.cpp's notation, to Lark. Raises `GrammarError`."""
    return _guarded(lambda: llguidance_gbnf.gbnf_to_lark(text))


def pattern_error(pattern: str) -> str | None:
    """Return why llguidance does not support a `pattern` of a JSON schema, None if it does.

    The check takes 0.1 ms, a few milliseconds for 8 kB. Compilation may find other errors.
    """
    schema = dumps({"type": "string", "pattern": pattern}).decode()
    limits = llguidance.LLParserLimits(initial_lexer_fuel=_MAX_PATTERN_FUEL, verbose_errors=False)
    try:
        message = llguidance.LLMatcher.validate_grammar('{"grammars":[{"json_schema":' + schema + "}]}", limits=limits)
    except BaseException as error:
        message = _library_error(error)
    if "lookarounds not supported" in message:
        return "look-around is not supported"
    if "regex parse error" not in message:
        return None
    return _message(message).rpartition("error: ")[2]


def slashes_escaped(pattern: str) -> str:
    """Return a regex for use between the slashes of Lark."""
    return llguidance.regex_to_lark(pattern)
