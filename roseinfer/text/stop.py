"""Stop strings in streamed text."""

from typing import NamedTuple


class StopFeed(NamedTuple):
    """Result of a feed. `text` may be sent; `stop` is the stop string that ended the sequence, or None."""

    text: str
    stop: str | None


class StopMatcher:
    """Search for the first complete stop string, which never lets out a part of it.

    A match ends at the earliest character at which any stop string ends; the longest of several wins. So the outcome
    does not depend on how the text is split. It withholds the longest end of the text that may grow into a stop string.
    Each character takes amortised constant time per stop string (Knuth-Morris-Pratt).

    include_stop: emit the stop string itself too. min_tokens: text of this many first tokens cannot be part of a match;
    feed them one by one.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False, min_tokens: int = 0) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=lambda s: (-len(s), s))]
        self._include_stop = include_stop
        self._exempt_tokens = min_tokens
        self._held = ""
        self._stop: str | None = None

    def feed(self, text: str, final: bool = False, tokens: int = 1) -> StopFeed:
        """Add the `text` of `tokens` further tokens. `final` releases withheld text.

        After a match, further text is dropped and the match is reported again.
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
        """Return the withheld text, since something other than text follows. No match continues across it."""
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
    """Automaton of one stop string; `matched` is the number of its characters that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = _borders(stop)

    def step(self, char: str) -> bool:
        """Take one more character. Return True once the stop string is complete, which ends the automaton."""
        matched = self.matched
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched - 1]
        if self.stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(self.stop)


def _borders(stop: str) -> list[int]:
    """Return, for each i, the length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
