"""Guides made from a `GuideSpec`. They nest: `TokenBan` around `ReasoningBudget` around `GrammarConstraint` (a grammar
from the start) or `TriggeredGrammar` (free text until a trigger). `FramedOutput` passes one of these the answer alone.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from roseinfer.core.guide import GuideSpec, Thinking, Trigger
from roseinfer.engine.guided.framed import FramedOutput
from roseinfer.engine.guided.guide import Guide, MaskSource
from roseinfer.engine.guided.mask_bits import allow, allow_all, forbid
from roseinfer.engine.guided.vocabulary import Vocabulary
from roseinfer.grammar.library import Grammar, Matcher


def grammars_of(spec: GuideSpec) -> tuple[str, ...]:
    """Return the texts of its grammars: first those of headers, then that of the whole output or answer, if any, then
    those of the triggers.
    """
    headers = () if spec.framing is None else spec.framing.headers
    return (*headers, *((spec.grammar,) if spec.grammar else ()), *(trigger.grammar for trigger in spec.triggers))


def token_ids_of(spec: GuideSpec) -> tuple[int, ...]:
    """Return all token ids in it."""
    thinking = spec.thinking
    ids = (*spec.banned, *(trigger.token_id for trigger in spec.triggers if trigger.token_id is not None))
    if thinking is not None:
        ids = (*ids, *thinking.begin, *thinking.end, *thinking.last_words)
    return ids if spec.framing is None else (*ids, *spec.framing.token_ids)


def make_guide(spec: GuideSpec, grammars: Sequence[Grammar], vocabulary: Vocabulary) -> Guide:
    """Return a guide at the start of an output. `grammars`: the compiled `grammars_of(spec)`."""
    guide: Guide
    framing = spec.framing
    if framing is not None:
        count = len(framing.headers)
        answer = make_guide(replace(spec, framing=None), grammars[count:], vocabulary)
        return FramedOutput(framing, grammars[:count], answer, vocabulary)
    if spec.grammar:
        guide = GrammarConstraint(grammars[0])
    else:
        guide = TriggeredGrammar(spec.triggers, grammars, spec.ends_after, vocabulary)
    thinking = spec.thinking
    if thinking is not None and (spec.grammar or spec.triggers or thinking.budget is not None):
        guide = ReasoningBudget(thinking, guide, vocabulary, _banned_while_thinking(spec, vocabulary))
    return TokenBan(spec.banned, guide, vocabulary) if spec.banned else guide


def _banned_while_thinking(spec: GuideSpec, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return tokens that are forbidden during reasoning: an output with a grammar must not end before the grammar's
    text.
    """
    return (*vocabulary.tokens.eos_ids, *spec.banned) if spec.grammar else ()


class GrammarConstraint:
    """Constraint by a grammar from the start. The output ends with the grammar."""

    __slots__ = ("_matcher",)

    ignores_output = edits_mask = False

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher()

    def advance(self, token_ids: Sequence[int]) -> bool:
        self._matcher.consume(token_ids)
        return self._matcher.complete

    def fork(self) -> "GrammarConstraint":
        fork = copy(self)
        fork._matcher = self._matcher.fork()
        return fork

    def forced(self, limit: int) -> Sequence[int]:
        return self._matcher.forced(limit)

    def mask(self) -> Matcher:
        return self._matcher

    def finish_mask(self, words: memoryview) -> bool:
        return self._matcher.complete


class TriggeredGrammar:
    """Free output until a trigger; then the trigger's grammar applies until it is complete; then free output again."""

    edits_mask = True

    __slots__ = ("_active", "_completed", "_ends_after", "_grammars", "_trigger_matcher", "_vocabulary")

    def __init__(
        self, triggers: Sequence[Trigger], grammars: Sequence[Grammar], ends_after: int, vocabulary: Vocabulary
    ) -> None:
        self._grammars = grammars
        self._ends_after = ends_after
        self._vocabulary = vocabulary
        self._trigger_matcher = _TriggerMatcher(triggers)
        self._active: Matcher | None = None
        self._completed = 0

    @property
    def ignores_output(self) -> bool:
        """True if there is no grammar to activate."""
        return not self._grammars

    def advance(self, token_ids: Sequence[int]) -> bool:
        return any(self._take(token) for token in token_ids)

    def _take(self, token: int) -> bool:
        if self._active is None:
            self._activate(token)
        else:
            self._active.consume((token,))
        return self._deactivate_if_complete()

    def _activate(self, token: int) -> None:
        """Activate the grammar of a trigger that `token` completes, unless it forbids the rest of the token."""
        if not self._grammars:
            return
        tokens = self._vocabulary.tokens
        found = self._trigger_matcher.feed(token, tokens.spelling(token))
        if found is None:
            return
        number, rest = found
        matcher = self._grammars[number].matcher()
        rest_ids = tokens.spell(rest) if rest else []
        if matcher.allows(rest_ids):
            matcher.consume(rest_ids)
            self._active = matcher
            self._trigger_matcher.reset()

    def _deactivate_if_complete(self) -> bool:
        """Deactivate a complete grammar. Return True if it was the last."""
        if self._active is None or not self._active.complete:
            return False
        self._active = None
        self._completed += 1
        return self._completed == self._ends_after

    def fork(self) -> "TriggeredGrammar":
        fork = copy(self)
        fork._trigger_matcher = copy(self._trigger_matcher)
        if self._active is not None:
            fork._active = self._active.fork()
        return fork

    def forced(self, limit: int) -> Sequence[int]:
        return () if self._active is None else self._active.forced(limit)

    def mask(self) -> Matcher | None:
        return self._active

    def finish_mask(self, words: memoryview) -> bool:
        """Deactivate a grammar that allows only the end of the output: it is complete, even if the library does not
        report it.
        """
        if self._active is not None and self._vocabulary.only_ends(words):
            self._active = None
            self._completed += 1
            allow_all(words)
        return 0 < self._ends_after <= self._completed


class _TriggerMatcher:
    """Matcher of triggers in the output: token triggers by id, text triggers in the bytes, across tokens."""

    __slots__ = ("_first", "_head", "_tail", "_tail_bytes", "_texts", "_tokens", "_triggers")

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._triggers = triggers
        self._tokens = {trigger.token_id: i for i, trigger in reversed([*enumerate(triggers)])}
        self._texts = [(i, t.text.encode(), t.at_start) for i, t in enumerate(triggers) if t.token_id is None]
        self._tail_bytes = max((len(text) for _, text, _ in self._texts), default=1) - 1
        self._tail = b""  # end of the output, where a text trigger may have begun
        self._first = True  # True before any output but white space and the beginning of a trigger
        self._head = b""  # that beginning

    def reset(self) -> None:
        """Forget earlier output."""
        self._tail = self._head = b""
        self._first = False

    def feed(self, token: int, spelling: bytes) -> tuple[int, bytes] | None:
        """Take a token. Return the number of the trigger that it completes, and the token's bytes after the trigger.

        If several triggers match, the one that ends first wins, then the longest.
        """
        number = self._tokens.get(token)
        if number is not None and self._triggers[number].at_start and not (self._first and not self._head):
            number = None
        found = self._in_text(spelling)
        return (number, b"") if number is not None else found

    def _in_text(self, spelling: bytes) -> tuple[int, bytes] | None:
        recent = self._tail + spelling
        head = (self._head + spelling).lstrip() if self._first else b""
        found = []  # per trigger: number of bytes after it, its own length, its number
        for number, text, at_start in self._texts:
            # A match that ended before these bytes was found earlier.
            at = recent.find(text, max(0, len(self._tail) - len(text) + 1))
            if at >= 0 and not at_start:
                found.append((len(recent) - at - len(text), len(text), number))
            elif at_start and self._first and head.startswith(text):
                found.append((len(head) - len(text), len(text), number))
        self._first = self._first and (not head or any(at and text.startswith(head) for _, text, at in self._texts))
        self._head = head if self._first else b""
        self._tail = recent[-self._tail_bytes :] if self._tail_bytes else b""
        if not found:
            return None
        rest_bytes, _, number = max(found)
        return number, spelling[len(spelling) - rest_bytes :]


class ReasoningBudget:
    """Reasoning before the output of another guide, up to a token budget.

    `banned`: tokens that are forbidden during reasoning.
    """

    __slots__ = (
        "_at_start",
        "_forced",
        "_guide",
        "_is_thinking",
        "_last_tokens",
        "_spec",
        "_thinking_mask",
        "_thinking_tokens",
        "_vocabulary",
    )

    ignores_output = False

    @property
    def edits_mask(self) -> bool:
        return self._at_start or self._guide.edits_mask

    def __init__(self, thinking: Thinking, guide: Guide, vocabulary: Vocabulary, banned: Sequence[int] = ()) -> None:
        self._spec = thinking
        self._thinking_mask = vocabulary.all_but(banned) if banned else None
        self._guide = guide
        self._vocabulary = vocabulary
        self._last_tokens: deque[int] = deque(maxlen=max(len(thinking.end), 1))
        self._forced: deque[int] = deque()  # tokens that must come next, to end the reasoning
        self._at_start = True  # no output yet
        self._thinking_tokens = 0
        self._is_thinking = False
        if thinking.inside:
            self._start_thinking()

    def advance(self, token_ids: Sequence[int]) -> bool:
        return any(self._take(token) for token in token_ids)

    def _take(self, token: int) -> bool:
        if self._is_thinking:
            self._count(token)
            return False
        begins = self._may_start_thinking and token in self._spec.begin
        self._at_start = False
        if begins:
            self._start_thinking()
            return False
        return self._guide.advance((token,))

    @property
    def _may_start_thinking(self) -> bool:
        """True at the start of the output, and where the inner guide has no mask."""
        return bool(self._spec.begin) and (self._at_start or self._guide.mask() is None)

    def _start_thinking(self) -> None:
        self._is_thinking = True
        self._at_start = False
        self._last_tokens.clear()
        self._enforce_budget()

    def _count(self, token: int) -> None:
        self._thinking_tokens += 1
        self._last_tokens.append(token)
        if self._forced:
            self._forced.popleft()
        if (*self._last_tokens,) == self._spec.end:
            self._is_thinking = False
            self._forced.clear()
        else:
            self._enforce_budget()

    def _enforce_budget(self) -> None:
        """Force the end of the reasoning once its budget is used up."""
        budget = self._spec.budget
        if budget is not None and self._thinking_tokens >= budget and not self._forced:
            self._forced.extend(self._spec.last_words or self._spec.end)

    def fork(self) -> "ReasoningBudget":
        fork = copy(self)
        fork._guide = self._guide.fork()
        fork._last_tokens = self._last_tokens.copy()
        fork._forced = self._forced.copy()
        return fork

    def forced(self, limit: int) -> Sequence[int]:
        if not self._forced and (self._is_thinking or self._at_start):
            return ()
        words = (*self._forced,)[:limit]
        if len(words) == limit:
            return words
        return (*words, *self._guide.forced(limit - len(words)))  # reasoning does not change this guide

    def mask(self) -> MaskSource | memoryview | None:
        if self._forced:
            return self._vocabulary.allow_only((self._forced[0],))
        return self._thinking_mask if self._is_thinking else self._guide.mask()

    def finish_mask(self, words: memoryview) -> bool:
        ended = self._guide.finish_mask(words)
        if self._at_start:
            allow(words, self._spec.begin)
        return ended


class TokenBan:
    """Constraint that forbids tokens which another guide allows."""

    edits_mask = True

    __slots__ = ("_banned", "_base_mask", "_guide")

    def __init__(self, banned: Sequence[int], guide: Guide, vocabulary: Vocabulary) -> None:
        self._banned = banned
        self._guide = guide
        self._base_mask = vocabulary.all_but(banned)

    @property
    def ignores_output(self) -> bool:
        return self._guide.ignores_output

    def advance(self, token_ids: Sequence[int]) -> bool:
        return self._guide.advance(token_ids)

    def fork(self) -> "TokenBan":
        fork = copy(self)
        fork._guide = self._guide.fork()
        return fork

    def forced(self, limit: int) -> Sequence[int]:
        return self._guide.forced(limit)

    def mask(self) -> MaskSource | memoryview:
        """Return a mask without the banned tokens. Tokens that another guide forces are allowed, even if banned."""
        mask = self._guide.mask()
        return self._base_mask if mask is None else mask

    def finish_mask(self, words: memoryview) -> bool:
        ended = self._guide.finish_mask(words)
        forbid(words, self._banned)
        return ended
