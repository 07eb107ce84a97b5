"""GuideFactory made from a `GuideSpec`. They nest:

`TokenBan` around `ReasoningBudget` around `GrammarConstraint` (a grammar from the start) or `TriggeredGrammar` (free
until a trigger).
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from roseinfer.core.plan import TokenMasks
from roseinfer.engine.guided.guides import Guide, MaskSource
from roseinfer.grammar.library import Grammar, GrammarTokens, Matcher

_ALL = 0xFFFFFFFF


def grammars_of(spec: GuideSpec) -> tuple[str, ...]:
    """The texts of its grammars: that of the whole output, if there is one, then those of the triggers."""
    return (*((spec.grammar,) if spec.grammar else ()), *(trigger.grammar for trigger in spec.triggers))


def token_ids_of(spec: GuideSpec) -> tuple[int, ...]:
    """All token ids that it names."""
    thinking = spec.thinking
    ids = (*spec.banned, *(trigger.token_id for trigger in spec.triggers if trigger.token_id is not None))
    return ids if thinking is None else (*ids, *thinking.begin, *thinking.end, *thinking.last_words)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What guides ask of the tokens. `size`: of the model's vocabulary. `future`: comes before any grammar does."""

    size: int
    future: Future[GrammarTokens]

    @property
    def tokens(self) -> GrammarTokens:
        return self.future.result()

    def only_ends(self, words: memoryview) -> bool:
        """Whether a line allows nothing but the end of the output."""
        ends = sum(1 << token for token in self.tokens.eos_ids)
        return not int.from_bytes(words.cast("B"), "little") & ~ends

    def line(self, token_ids: Sequence[int]) -> memoryview:
        """A line of `TokenMasks` that allows these tokens alone."""
        line = memoryview(bytearray(4 * TokenMasks.words_per_row(self.size))).cast("I")
        allow(line, token_ids)
        return line

    def all_but(self, token_ids: Sequence[int]) -> memoryview:
        """A line that forbids these tokens alone."""
        line = self.line(())
        allow_all(line)
        forbid(line, token_ids)
        return line


def allow(words: memoryview, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        words[token // 32] |= 1 << token % 32


def forbid(words: memoryview, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        words[token // 32] &= _ALL ^ (1 << token % 32)


def allow_all(words: memoryview) -> None:
    words.cast("B")[:] = b"\xff" * words.nbytes


def make_guide(spec: GuideSpec, grammars: Sequence[Grammar], vocabulary: Vocabulary) -> Guide:
    """A guide at the start of an output. `grammars`: those of `grammars_of(spec)`, compiled."""
    guide: Guide
    if spec.grammar:
        guide = GrammarConstraint(grammars[0])
    else:
        guide = TriggeredGrammar(spec.triggers, grammars, spec.ends_after, vocabulary)
    thinking = spec.thinking
    if thinking is not None and (spec.grammar or spec.triggers or thinking.budget is not None):
        guide = ReasoningBudget(thinking, guide, vocabulary, _never_thought(spec, vocabulary))
    return TokenBan(spec.banned, guide, vocabulary) if spec.banned else guide


def _never_thought(spec: GuideSpec, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Tokens that are not said while the model thinks: an output that owes a document does not end before it."""
    return (*vocabulary.tokens.eos_ids, *spec.banned) if spec.grammar else ()


class GrammarConstraint:
    """A grammar holds from the start, and the output ends with it."""

    __slots__ = ("_matcher",)

    ignores_output = edits_mask = False

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher()

    def advance(self, token_ids: Sequence[int]) -> bool:
        self._matcher.consume(token_ids)
        return self._matcher.complete

    def mask(self) -> Matcher:
        return self._matcher

    def finish_mask(self, words: memoryview) -> bool:
        return self._matcher.complete


class TriggeredGrammar:
    """The output is free until a trigger is said; then the trigger's grammar holds, and behind it freedom again."""

    edits_mask = True

    __slots__ = ("_active", "_completed", "_ends_after", "_grammars", "_listener", "_vocabulary")

    def __init__(
        self, triggers: Sequence[Trigger], grammars: Sequence[Grammar], ends_after: int, vocabulary: Vocabulary
    ) -> None:
        self._grammars = grammars
        self._ends_after = ends_after
        self._vocabulary = vocabulary
        self._listener = _Listener(triggers)
        self._active: Matcher | None = None
        self._completed = 0

    @property
    def ignores_output(self) -> bool:
        """Whether there is nothing that could wake a grammar."""
        return not self._grammars

    def advance(self, token_ids: Sequence[int]) -> bool:
        return any(self._take(token) for token in token_ids)

    def _take(self, token: int) -> bool:
        if self._active is None:
            self._hear(token)
        else:
            self._active.consume((token,))
        return self._settled()

    def _hear(self, token: int) -> None:
        """Wake the grammar of a trigger that `token` completes, unless it forbids what the token has behind it."""
        if not self._grammars:
            return
        tokens = self._vocabulary.tokens
        found = self._listener.hear(token, tokens.spelling(token))
        if found is None:
            return
        number, rest = found
        matcher = self._grammars[number].matcher()
        more = tokens.spell(rest) if rest else []
        if matcher.allows(more):
            matcher.consume(more)
            self._active = matcher
            self._listener.forget()

    def _settled(self) -> bool:
        """Put a complete grammar to sleep. Returns whether it was the last."""
        if self._active is None or not self._active.complete:
            return False
        self._active = None
        self._completed += 1
        return self._completed == self._ends_after

    def mask(self) -> Matcher | None:
        return self._active

    def finish_mask(self, words: memoryview) -> bool:
        """A grammar that leaves nothing but the end of the output is complete, whether it knows that or not."""
        if self._active is not None and self._vocabulary.only_ends(words):
            self._active = None
            self._completed += 1
            allow_all(words)
        return 0 < self._ends_after <= self._completed


class _Listener:
    """Finds triggers in what is said: tokens by their id, texts in the bytes, which may go across tokens."""

    __slots__ = ("_first", "_head", "_kept", "_tail", "_texts", "_tokens", "_triggers")

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._triggers = triggers
        self._tokens = {trigger.token_id: i for i, trigger in reversed([*enumerate(triggers)])}
        self._texts = [(i, t.text.encode(), t.at_start) for i, t in enumerate(triggers) if t.token_id is None]
        self._kept = max((len(text) for _, text, _ in self._texts), default=1) - 1
        self._tail = b""  # where an unfinished trigger may begin
        self._first = True  # whether only white space was said, and perhaps the beginning of a trigger, which is
        self._head = b""

    def forget(self) -> None:
        """What comes next has nothing to do with what was said."""
        self._tail = self._head = b""
        self._first = False

    def hear(self, token: int, spelling: bytes) -> tuple[int, bytes] | None:
        """The number of the trigger that the token completes, and what the token has behind it.

        Of several that one which ends first, or is longest.
        """
        number = self._tokens.get(token)
        if number is not None and self._triggers[number].at_start and not (self._first and not self._head):
            number = None
        found = self._in_text(spelling)
        return (number, b"") if number is not None else found

    def _in_text(self, spelling: bytes) -> tuple[int, bytes] | None:
        said = self._tail + spelling
        head = (self._head + spelling).lstrip() if self._first else b""
        found = []  # of each trigger: the bytes behind it, its own, its number
        for number, text, at_start in self._texts:
            # One that ended before these bytes was found then.
            at = said.find(text, max(0, len(self._tail) - len(text) + 1))
            if at >= 0 and not at_start:
                found.append((len(said) - at - len(text), len(text), number))
            elif at_start and self._first and head.startswith(text):
                found.append((len(head) - len(text), len(text), number))
        self._first = self._first and (not head or any(at and text.startswith(head) for _, text, at in self._texts))
        self._head = head if self._first else b""
        self._tail = said[-self._kept :] if self._kept else b""
        if not found:
            return None
        behind, _, number = max(found)
        return number, spelling[len(spelling) - behind :]


class ReasoningBudget:
    """Lets the model think before the output of another guide begins, as long as the budget lasts.

    `never`: tokens that are not said meanwhile.
    """

    __slots__ = ("_guide", "_heard", "_meanwhile", "_script", "_spec", "_start", "_thinks", "_thought", "_vocabulary")

    ignores_output = False

    @property
    def edits_mask(self) -> bool:
        return self._start or self._guide.edits_mask

    def __init__(self, thinking: Thinking, guide: Guide, vocabulary: Vocabulary, never: Sequence[int] = ()) -> None:
        self._spec = thinking
        self._meanwhile = vocabulary.all_but(never) if never else None
        self._guide = guide
        self._vocabulary = vocabulary
        self._heard: deque[int] = deque(maxlen=max(len(thinking.end), 1))
        self._script: deque[int] = deque()  # the last words, as far as they are still to be said
        self._start = True  # nothing has been said
        self._thought = 0
        self._thinks = False
        if thinking.inside:
            self._think()

    def advance(self, token_ids: Sequence[int]) -> bool:
        return any(self._take(token) for token in token_ids)

    def _take(self, token: int) -> bool:
        if self._thinks:
            self._hear(token)
            return False
        begins = self._may_begin and token in self._spec.begin
        self._start = False
        if begins:
            self._think()
            return False
        return self._guide.advance((token,))

    @property
    def _may_begin(self) -> bool:
        """As the first that is said, or wherever the text is free."""
        return bool(self._spec.begin) and (self._start or self._guide.mask() is None)

    def _think(self) -> None:
        self._thinks = True
        self._start = False
        self._heard.clear()
        self._mind_budget()

    def _hear(self, token: int) -> None:
        self._thought += 1
        self._heard.append(token)
        if self._script:
            self._script.popleft()
        if (*self._heard,) == self._spec.end:
            self._thinks = False
            self._script.clear()
        else:
            self._mind_budget()

    def _mind_budget(self) -> None:
        """Once it is used up the model has to come to its end."""
        budget = self._spec.budget
        if budget is not None and self._thought >= budget and not self._script:
            self._script.extend(self._spec.last_words or self._spec.end)

    def mask(self) -> MaskSource | memoryview | None:
        if self._script:
            return self._vocabulary.line((self._script[0],))
        return self._meanwhile if self._thinks else self._guide.mask()

    def finish_mask(self, words: memoryview) -> bool:
        ended = self._guide.finish_mask(words)
        if self._start:
            allow(words, self._spec.begin)
        return ended


class TokenBan:
    """Takes tokens away from what another guide allows."""

    edits_mask = True

    __slots__ = ("_banned", "_guide", "_others")

    def __init__(self, banned: Sequence[int], guide: Guide, vocabulary: Vocabulary) -> None:
        self._banned = banned
        self._guide = guide
        self._others = vocabulary.all_but(banned)

    @property
    def ignores_output(self) -> bool:
        return self._guide.ignores_output

    def advance(self, token_ids: Sequence[int]) -> bool:
        return self._guide.advance(token_ids)

    def mask(self) -> MaskSource | memoryview:
        """A token that has to be said next is said, banned or not."""
        mask = self._guide.mask()
        return self._others if mask is None else mask

    def finish_mask(self, words: memoryview) -> bool:
        ended = self._guide.finish_mask(words)
        forbid(words, self._banned)
        return ended
