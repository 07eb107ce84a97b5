"""Stop strings over streamed text."""

from typing import NamedTuple


class StopFeed(NamedTuple):
    """`text` may be sent; `stop` is the stop string that ended the sequence, or None."""

    text: str
    stop: str | None


class StopMatcher:
    """Finds the first place where a stop string is complete, and never lets out a part of it.

    A match is decided at the earliest character at which any stop string ends; of several that end there the longest
    counts. So the outcome does not depend on how the text is cut into pieces. Held back is the longest end of the text
    that may still grow into a stop string. Each character costs amortised constant time per stop string
    (Knuth-Morris-Pratt), whatever the strings are.

    `include_stop`: the stop string itself is emitted too. `min_tokens`: text of the first so many tokens cannot take
    part in a match; feed token by token until they are through.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False, min_tokens: int = 0) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=lambda s: (-len(s), s))]
        self._include_stop = include_stop
        self._exempt_tokens = min_tokens
        self._held = ""
        self._stop: str | None = None

    def feed(self, text: str, final: bool = False, tokens: int = 1) -> StopFeed:
        """`text` is what `tokens` further tokens brought; `final` lets go of what is held back.

        After a match everything further is dropped, and the match is reported again.
        """
        if self._stop is not None:
            return StopFeed("", self._stop)
        if self._exempt_tokens > 0:
            self._exempt_tokens -= tokens
            return StopFeed(text, None)
        if not self._automata:
            return StopFeed(text, None)
        start = len(self._held)
        text = self._held + text
        for end in range(start + 1, len(text) + 1):
            self._stop = self._step(text[end - 1])
            if self._stop is not None:
                self._held = ""
                return StopFeed(text[: end if self._include_stop else end - len(self._stop)], self._stop)
        kept = 0 if final else max(automaton.matched for automaton in self._automata)
        cut = len(text) - kept
        self._held = text[cut:]
        return StopFeed(text[:cut], None)

    def release(self) -> str:
        """What is held back, because something other than text follows: no match goes on across it."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return held

    def _step(self, char: str) -> str | None:
        complete = None
        for automaton in self._automata:
            if automaton.step(char) and complete is None:
                complete = automaton.stop
        return complete


class _Automaton:
    """How many characters of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = _borders(stop)

    def step(self, char: str) -> bool:
        """Take one more character; True once the stop string is complete (then the automaton is done)."""
        matched = self.matched
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched - 1]
        if self.stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(self.stop)


def _borders(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
