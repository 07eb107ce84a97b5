"""Guide of an output that consists of messages: headers follow a grammar, and constraints apply to answers only."""

from collections import deque
from collections.abc import Sequence
from copy import copy
from enum import Enum, auto

from roseinfer.core.guide import Framing
from roseinfer.engine.guided.guide import Guide, MaskSource
from roseinfer.engine.guided.vocabulary import Vocabulary
from roseinfer.grammar.library import Grammar, Matcher


class OutputPart(Enum):
    """Part of a message that the next token belongs to."""

    HEADER = auto()
    CALL = auto()  # arguments, which the grammar of the header includes
    THINKING = auto()
    ANSWER = auto()
    OTHER = auto()


class FramedOutput:
    """Messages within a `Framing`. Reasoning and other messages are free; `answer` guides the content of answers.

    The output is complete with the arguments of a call, or with the answer if that is constrained.
    """

    __slots__ = (
        "_answer",
        "_begins",
        "_channel",
        "_forced",
        "_framing",
        "_free_mask",
        "_headers",
        "_matcher",
        "_part",
        "_thinking_tokens",
        "_vocabulary",
    )

    ignores_output = False
    edits_mask = True

    def __init__(self, framing: Framing, headers: Sequence[Grammar], answer: Guide, vocabulary: Vocabulary) -> None:
        """`headers`: the compiled grammars of the framing."""
        self._framing = framing
        self._headers = headers
        self._answer = answer
        self._vocabulary = vocabulary
        self._begins = frozenset({framing.opening[0], framing.channel, framing.end})
        self._free_mask = vocabulary.all_but(self._forbidden_in_content()) if framing.must_answer else None
        self._forced: deque[int] = deque()  # tokens that must come next, to end the reasoning
        self._thinking_tokens = 0
        self._part = OutputPart.HEADER
        self._channel: bytes | None = None  # as far as it has come in this header
        self._matcher: Matcher | None = None  # None: any header
        self._begin_header()
        assert self._matcher is not None
        if not self._matcher.allows(framing.begun):
            self._matcher = None
        for token in framing.begun:
            self._take(token)

    def _forbidden_in_content(self) -> tuple[int, ...]:
        """Return tokens that would end an output without an answer, and those of headers."""
        framing = self._framing
        return (*self._vocabulary.tokens.eos_ids, *framing.stops, framing.opening[0], framing.channel, framing.content)

    # --- output ---------------------------------------------------------------------------------------------------
    def advance(self, token_ids: Sequence[int]) -> bool:
        return any(self._take(token) for token in token_ids)

    def _take(self, token: int) -> bool:
        """Take a token. Return True if the output is complete."""
        if self._forced:
            self._forced.popleft()
        if self._part is OutputPart.CALL:
            assert self._matcher is not None
            self._matcher.consume((token,))
            return self._matcher.complete
        if self._part is OutputPart.HEADER:
            self._take_header(token)
            return False
        if self._part is OutputPart.ANSWER and (token not in self._begins or self._answer.mask() is not None):
            return self._answer.advance((token,))
        if token in self._begins:
            self._begin_header()
            if token != self._framing.end:
                self._take_opening(token)
        elif self._part is OutputPart.THINKING:
            self._thinking_tokens += 1
            self._enforce_budget()
        return False

    def _begin_header(self) -> None:
        self._part, self._channel = OutputPart.HEADER, None
        self._forced.clear()
        self._matcher = self._headers[-1 if self._is_spent else 0].matcher()

    def _take_opening(self, token: int) -> None:
        """Take the first token of a header, or its `channel`, before which the model has left out the opening."""
        opening = self._framing.opening
        for each in (*opening, token) if token == self._framing.channel else (token,):
            self._take_header(each)

    def _take_header(self, token: int) -> None:
        framing = self._framing
        if self._matcher is not None:
            self._matcher.consume((token,))
        elif token == framing.end:
            self._begin_header()
            return
        if token == framing.content:
            self._begin_content()
        elif token == framing.channel:
            self._channel = b""
        elif self._channel is not None:
            self._channel += self._vocabulary.tokens.spelling(token)

    def _begin_content(self) -> None:
        if self._matcher is not None and not self._matcher.accepting:
            self._part = OutputPart.CALL
            return
        self._matcher = None
        channel = (self._channel or b"").lstrip()
        if channel.startswith(self._framing.thinking.encode()):
            self._part = OutputPart.THINKING
            self._enforce_budget()
        else:
            self._part = OutputPart.ANSWER if channel.startswith(self._framing.answer.encode()) else OutputPart.OTHER

    # --- budget ---------------------------------------------------------------------------------------------------
    @property
    def _is_spent(self) -> bool:
        budget = self._framing.budget
        return budget is not None and self._thinking_tokens >= budget

    def _enforce_budget(self) -> None:
        """Force the end of the reasoning once its budget is used up."""
        if self._is_spent and not self._forced:
            self._forced.extend(self._framing.last_words)

    # --- masks ----------------------------------------------------------------------------------------------------
    def fork(self) -> "FramedOutput":
        fork = copy(self)
        fork._answer = self._answer.fork()
        fork._forced = self._forced.copy()
        if self._matcher is not None:
            fork._matcher = self._matcher.fork()
        return fork

    def forced(self, limit: int) -> Sequence[int]:
        if self._forced:
            return (*self._forced,)[:limit]
        if self._matcher is not None:
            return self._matcher.forced(limit)
        return self._answer.forced(limit) if self._part is OutputPart.ANSWER else ()

    def mask(self) -> MaskSource | memoryview | None:
        if self._forced:
            return self._vocabulary.allow_only((self._forced[0],))
        if self._part in (OutputPart.HEADER, OutputPart.CALL):
            return self._matcher
        return self._answer.mask() if self._part is OutputPart.ANSWER else self._free_mask

    def finish_mask(self, words: memoryview) -> bool:
        if self._part is OutputPart.ANSWER:
            return self._answer.finish_mask(words)
        return self._part is OutputPart.CALL and self._vocabulary.only_ends(words)
