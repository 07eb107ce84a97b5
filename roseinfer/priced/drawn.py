"""Drawn runner: a runner without a model, which draws the tokens of an output from the request's seed and prompt."""

import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import log

from roseinfer.core.errors import NO_TOKEN_ALLOWED
from roseinfer.core.plan import Admission, RowResult, StepLimits, StepPlan, StepResult, TokenMasks, new_row_result
from roseinfer.core.runner import Capabilities

# Words to try under a mask before searching the whole vocabulary.
_MAX_TRIES = 32


@dataclass(frozen=True, slots=True)
class DrawnVocabulary:
    """Vocabulary of `size` ids, of which `words` are drawn. `eos_ids` end outputs.

    `closers` end strings, lists and the like. They are tried when a masked output has reached its length.
    """

    size: int
    words: Sequence[int]
    closers: Sequence[int] = ()
    eos_ids: tuple[int, ...] = ()


def key_of(seed: int, prompt_ids: Sequence[int]) -> int:
    """Return the 32-bit key of seed and prompt that a text is drawn from; it is the same on every machine."""
    return zlib.crc32(array("I", prompt_ids).tobytes(), zlib.crc32(seed.to_bytes(8, "little", signed=True)))


def drawn_length(key: int, mean: float) -> int:
    """Return the tokens of an output, including its EOS: geometric with this mean, by inversion."""
    return length_of_draw(zlib.crc32(b"length", key), mean)


def length_of_draw(bits: int, mean: float) -> int:
    """Return the length for a draw of 32 random bits; smaller draws give longer outputs."""
    return 1 if mean <= 1 else 1 + int(log((bits + 0.5) / 2**32) / log(1 - 1 / mean))


class _Seat:
    """State of one output. Token `index` depends on seed, prompt and index only, unless the request forbids it.

    Sampled tokens are stored only if the request forbids sequences of tokens.
    """

    __slots__ = ("bad", "end_at", "eos", "key", "min_tokens", "outputs", "pool", "prompt_len", "stop_ids")

    def __init__(self, admission: Admission, vocabulary: DrawnVocabulary, mean_len: float) -> None:
        params, prompt_len = admission.params, admission.prompt_len
        self.key = key_of(admission.seed, admission.token_ids[:prompt_len])
        self.prompt_len = prompt_len
        self.pool: Sequence[int] = params.allowed_token_ids or vocabulary.words
        self.min_tokens = params.min_tokens
        self.stop_ids = admission.stop_ids
        allowed = params.allowed_token_ids
        self.eos = next(
            (id for id in vocabulary.eos_ids if id in admission.stop_ids and (allowed is None or id in allowed)), None
        )
        self.end_at = max(drawn_length(self.key, mean_len) - 1, self.min_tokens)
        self.bad = params.bad_token_ids
        self.outputs = list(admission.token_ids[prompt_len:]) if self.bad else []

    @property
    def free(self) -> bool:
        """True if every word may be drawn at every position."""
        return not self.bad and (self.min_tokens == 0 or not set(self.stop_ids) & set(self.pool))

    def forbids(self, token: int, index: int) -> bool:
        if index < self.min_tokens and token in self.stop_ids:
            return True
        return any(token == ids[-1] and self._ends_with(ids[:-1]) for ids in self.bad)

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return not ids or tuple(self.outputs[-len(ids) :]) == ids

    def in_order(self, index: int) -> Iterable[int]:
        """Return the words, beginning with the drawn one."""
        pool, count = self.pool, len(self.pool)
        at = zlib.crc32(index.to_bytes(4, "little"), self.key)
        return (pool[(at + step) % count] for step in range(count))


class _Mask:
    """Mask of one row."""

    def __init__(self, words: "memoryview[int]", size: int) -> None:
        self._words = words
        self._size = size

    def __contains__(self, token: int) -> bool:
        return token < self._size and bool(self._words[token >> 5] >> (token & 31) & 1)

    def allowed(self, near: int) -> Iterable[int]:
        """Return all allowed tokens, beginning with those near a token."""
        count = len(self._words)
        for step in range(count):
            place = ((near >> 5) + step) % count
            if word := self._words[place]:
                yield from (t for t in range(place << 5, (place << 5) + 32) if word >> (t & 31) & 1 and t < self._size)


@dataclass(slots=True)
class DrawnRunner:
    """Runner whose texts do not depend on the schedule (chunks, preemptions, steps in flight) or the engine.

    It is certain of each token, so temperature, top-k, penalties and biases have no effect. Output lengths have the
    mean `mean_len`. A row for which no token is allowed has an error.
    """

    vocabulary: DrawnVocabulary
    mean_len: float
    limits: StepLimits
    capabilities: Capabilities = field(default=Capabilities(drafts=True, masks=True), init=False)
    _seats: dict[int, _Seat] = field(default_factory=dict, init=False)
    _free: set[int] = field(default_factory=set, init=False)
    _space: "array[int]" = field(default_factory=lambda: array("I"), init=False)
    _results: dict[int, StepResult] = field(default_factory=dict, init=False)

    def submit(self, plan: StepPlan) -> StepPlan:
        self.limits.check(plan)
        for seat in plan.released:
            self._seats.pop(seat, None)
        for admission in plan.admitted:
            seated = self._seats[admission.seat] = _Seat(admission, self.vocabulary, self.mean_len)
            (self._free.add if seated.free else self._free.discard)(admission.seat)
        return plan

    def mask_space(self, lines: int) -> memoryview:
        words = lines * TokenMasks.words_per_row(self.vocabulary.size)
        if len(self._space) < words:
            self._space = array("I", bytes(4 * words))
        return memoryview(self._space)[:words]

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> None:
        lines = {} if masks is None else self._lines(masks)
        rows = []
        for i, (name, seat, start, count, _, sample, _, _, _, drafts) in enumerate(handle.rows):
            if not sample:
                rows.append(new_row_result((name, (), None, None, None, None)))
            elif drafts:
                rows.append(self._verified(name, seat, start, drafts, [lines.get((i, n)) for n in range(count)]))
            else:
                rows.append(self._token(name, seat, start + count, lines.get((i, 0)) if lines else None))
        self._results[handle.step] = StepResult(handle.step, rows)

    def _token(self, name: str, seat: int, position: int, mask: _Mask | None) -> RowResult:
        """Return the token at a position of the text."""
        own = self._seats[seat]
        index = position - own.prompt_len
        if mask is not None:
            return self._guided(name, own, index, mask)
        if index >= own.end_at and own.eos is not None:
            return new_row_result((name, (own.eos,), None, None, None, None))
        if seat in self._free:
            at = zlib.crc32(index.to_bytes(4, "little"), own.key) % len(own.pool)
            return new_row_result((name, (own.pool[at],), None, None, None, None))
        return self._first(name, own, index, own.in_order(index))

    def _verified(
        self, name: str, seat: int, start: int, drafts: tuple[int, ...], masks: Sequence[_Mask | None]
    ) -> RowResult:
        """Return the tokens of a row with drafts, up to the replacement of the first wrong one or an error."""
        tokens: list[int] = []
        for draft, mask in zip((*drafts, None), masks, strict=True):
            found = self._token(name, seat, start + 1 + len(tokens), mask)
            if found.error is not None:
                return RowResult(name, tuple(tokens), error=found.error)
            tokens += found.token_ids
            if tokens[-1] != draft:
                break
        return RowResult(name, tuple(tokens))

    def _lines(self, masks: TokenMasks) -> dict[tuple[int, int], _Mask]:
        """Return the masks by row and number of drafts before the token that they restrict."""
        size = TokenMasks.words_per_row(self.vocabulary.size)
        before = masks.drafts_before or (0,) * len(masks.rows)
        return {
            place: _Mask(masks.words[line * size : (line + 1) * size], self.vocabulary.size)
            for line, place in enumerate(zip(masks.rows, before, strict=True))
        }

    def _guided(self, name: str, own: _Seat, index: int, mask: _Mask) -> RowResult:
        """Return EOS or a closer once the output is long enough, before that a drawn word, else any allowed token.

        `min_tokens` is ignored if nothing else is allowed, because the guide knows when an output is complete.
        """
        over = index >= own.end_at
        wanted = [*(() if own.eos is None else (own.eos,)), *self.vocabulary.closers] if over else []
        drawn = [token for token, _ in zip(own.in_order(index), range(_MAX_TRIES), strict=False)]
        any_word = own.pool is self.vocabulary.words

        def allowed() -> Iterator[int]:
            tokens = chain(wanted, drawn, mask.allowed(drawn[0]))
            return (token for token in tokens if token in mask and (any_word or token in own.pool))

        result = self._first(name, own, index, allowed())
        if result.error is not None and index < own.min_tokens:
            result = self._first(name, own, own.min_tokens, allowed())
        return result

    def _first(self, name: str, own: _Seat, index: int, tokens: Iterable[int]) -> RowResult:
        """Return the first token that the request does not forbid."""
        token = next((token for token in tokens if not own.forbids(token, index)), None)
        if token is None:
            return RowResult(name, error=f"{NO_TOKEN_ALLOWED}the request forbids all of them")
        if own.bad:
            own.outputs.append(token)
        return new_row_result((name, (token,), None, None, None, None))

    def collect(self, handle: StepPlan) -> StepResult:
        return self._results.pop(handle.step)

    def close(self) -> None:
        """Do nothing: no resources are held."""
