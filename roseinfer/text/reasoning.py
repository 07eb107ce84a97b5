"""Reasoning of thinking models, between marks such as `<think>` and `</think>`, separated from the answer.

The chat template shows whether a model thinks, the tokenizer which tokens its marks are. The prompt decides whether the
output begins within the reasoning: templates open, close or omit it as requested.
"""

from collections.abc import Sequence

from roseinfer.core.guide import Thinking
from roseinfer.text.output import Event, OutputParser, Reasoning, Text
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import CallParser, Mark

# Pairs of marks around reasoning.
PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
SPACE = " \t\r\n"


class Reasoner:
    """Marks of a model's reasoning. Thread safe."""

    def __init__(self, begin: str, end: str, tokenizer: Tokenizer) -> None:
        self.begin, self.end = Mark.of(begin, tokenizer), Mark.of(end, tokenizer)
        self.end_ids = tuple(tokenizer.encode(end, add_special_tokens=False))
        self._tokenizer = tokenizer

    @classmethod
    def detect(cls, template: str | None, tokenizer: Tokenizer) -> "Reasoner | None":
        """Return None for a model that does not think: its chat template has no such marks."""
        if template is None:
            return None
        pair = next((pair for pair in PAIRS if pair[1] in template), None)
        return None if pair is None else cls(*pair, tokenizer)

    def inside(self, prompt_ids: Sequence[int]) -> bool:
        """Return True if a rendered prompt leaves the model thinking: a mark is open in its last turn.

        A turn begins after the last special token that is no mark, or at the beginning of the prompt.
        """
        marks = (self.begin.id, self.end.id)
        specials = self._tokenizer.special_ids
        turn: list[int] = []
        for id in reversed(prompt_ids):
            if id in marks:
                return id == self.begin.id
            if id in specials:
                break
            turn.append(id)
        if self.begin.id is not None:
            return False
        text = self._tokenizer.decode(turn[::-1], skip_special_tokens=False)
        return text.rfind(self.begin.text) > text.rfind(self.end.text)

    def thinking(self, inside: bool, budget: int | None = None, last_words: str = "") -> Thinking:
        """Return the engine's parameters. `budget`: in tokens. `last_words`: a text that is forced before the end mark.

        The engine detects that the model begins to think by itself only if the mark is a token.
        """
        begin = () if self.begin.id is None else (self.begin.id,)
        words: list[int] = []
        if budget is not None and last_words:
            words = self._tokenizer.encode(last_words + self.end.text, add_special_tokens=False)
        return Thinking(inside=inside, begin=begin, end=self.end_ids, budget=budget, last_words=tuple(words))

    def parser(self, inside: bool, calls: CallParser | None = None, *, bare: bool = False) -> OutputParser:
        """Return a parser. `inside`: the output begins within the reasoning. `calls`: parser of the rest; None: plain
        text. `bare`: drop white space before the answer even without reasoning.
        """
        return ReasoningParser(self.begin, self.end, inside, calls or PlainParser(), bare)


class PlainParser:
    """Parser of plain text."""

    failures = 0
    reasoning_tokens = 0
    only_calls = False
    within_call = False
    markers: frozenset[int] = frozenset()

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        return [Text(text)] if text else []

    def end(self) -> list[Event]:
        return []


class ReasoningParser:
    """Parser that separates reasoning from the rest, which it passes to `rest`.

    Reasoning may come first, or be open from the start (`inside`). If its opening mark is a token, it may begin again
    wherever no call is open. White space next to the marks is dropped; with `bare` also at the start.
    """

    def __init__(self, begin: Mark, end: Mark, inside: bool, rest: CallParser, bare: bool = False) -> None:
        self.reasoning_tokens = 0
        self._begin, self._end, self._rest = begin, end, rest
        self._bare = bare
        self._step = self._think if inside else self._first
        self._said = False  # this reasoning has produced text
        self._space: list[str] = []
        self._held = ""  # possible beginning of a mark
        self._unsure = 0  # tokens of a possible opening mark

    @property
    def failures(self) -> int:
        return self._rest.failures

    @property
    def markers(self) -> frozenset[int]:
        own = {mark.id for mark in (self._begin, self._end) if mark.id is not None}
        return self._rest.markers | own

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        if self._step == self._pass_on and token_id != self._begin.id:
            return self._rest.feed(text, token_id)
        return self._step(text, token_id)

    def end(self) -> list[Event]:
        held, space = self._held, "".join(self._space)
        if self._bare and self._step == self._first:
            space = ""
        if self._step == self._think:
            # With its end mark, white space at the end of the reasoning would have been dropped.
            return [Reasoning(space + held)] if held else []
        events = self._rest.feed(space + held, None) if self._step == self._first and space + held else []
        return events + self._rest.end()

    # --- steps: each takes a token's text in one state ---------------------------------------------------------
    def _first(self, text: str, token_id: int | None) -> list[Event]:
        """Parse output before anything but white space has come."""
        if token_id is not None and token_id == self._begin.id:
            return self._open()
        self._unsure += 1
        text = self._held + text
        self._held = ""
        bare = text.lstrip(SPACE)
        if not bare:
            self._space.append(text)
            return []
        mark = self._begin.text
        if self._begin.id is None or token_id is None:
            if bare.startswith(mark):
                self.reasoning_tokens += self._unsure
                self._open(counted=True)
                return self._think(bare[len(mark) :], token_id, counted=True)
            if mark.startswith(bare):
                self._space.append(text[: len(text) - len(bare)])
                self._held = bare
                return []
        text = bare if self._bare else "".join(self._space) + text
        self._space = []
        self._step = self._pass_on
        return self._rest.feed(text, token_id)

    def _open(self, counted: bool = False) -> list[Event]:
        self.reasoning_tokens += not counted
        self._step, self._said, self._space, self._held = self._think, False, [], ""
        return []

    def _think(self, text: str, token_id: int | None, counted: bool = False) -> list[Event]:
        self.reasoning_tokens += not counted
        mark = self._end.text
        if token_id is not None and self._end.id is not None:
            if token_id != self._end.id:
                return self._thought(text)
            before, behind = text.removesuffix(mark), ""
        else:
            text = self._held + text
            at = text.find(mark)
            if at < 0:
                kept = _begun(text, mark)
                self._held = text[len(text) - kept :]
                return self._thought(text[: len(text) - kept])
            before, behind = text[:at], text[at + len(mark) :]
        events = self._thought(before)
        self._step, self._space, self._held = self._behind, [], ""
        return events + (self._behind(behind, token_id) if behind else [])

    def _thought(self, text: str) -> list[Event]:
        if not self._said:
            text = text.lstrip(SPACE)
        kept = text.rstrip(SPACE)
        if not kept:
            if text:
                self._space.append(text)
            return []
        shown = "".join(self._space) + kept
        self._said = True
        self._space = [text[len(kept) :]] if len(kept) < len(text) else []
        return [Reasoning(shown)]

    def _behind(self, text: str, token_id: int | None) -> list[Event]:
        """Drop white space after the reasoning."""
        text = text.lstrip(SPACE)
        if not text:
            return []
        self._step = self._pass_on
        return self._pass_on(text, token_id)

    def _pass_on(self, text: str, token_id: int | None) -> list[Event]:
        if token_id is not None and token_id == self._begin.id and not self._rest.within_call:
            return self._open()
        return self._rest.feed(text, token_id)


def _begun(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is an unfinished `mark`; a mark's first character occurs
    once.
    """
    at = text.rfind(mark[0])
    return len(text) - at if at >= 0 and mark.startswith(text[at:]) else 0
