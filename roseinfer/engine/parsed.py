"""A sequence whose output a parser reads: from token ids to events instead of text alone."""

from collections.abc import Sequence

from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.engine.output import SequenceText
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.output import Event, OutputParser, Text
from roseinfer.text.stop import StopMatcher
from roseinfer.text.tokenizer import Tokenizer


class ParsedSequenceText(SequenceText):
    """Chunks with events. The parser gets the output token by token, with the special tokens that it wants to see
    whatever `skip_special_tokens` says: that is about what is shown.

    Stop strings are looked for in `Text` events alone, and not across what comes between two of them.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer, parser: OutputParser) -> None:
        super().__init__(index, params, tokenizer)
        self._parser = parser
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._markers = parser.markers
        self._hidden = tokenizer.special_ids - parser.markers if params.skip_special_tokens else frozenset[int]()

    def drop(self) -> None:
        if not self.ended:
            self._parser.end()  # one that waits for more is a cycle

    def _read(self, chunk: SequenceChunk, shown: Sequence[int], last: bool) -> str | None:
        parser = self._parser
        events: list[Event] = []
        for token in shown:
            events += self._feed(token)
        if last:
            rest = self._detokenizer.flush()
            if rest:
                events += parser.feed(rest, None)
            events += parser.end()
            chunk.parse_failures = parser.failures
        stop = None
        if self._matcher is not None:
            events, stop = self._up_to_stop(self._matcher, events, len(chunk.token_ids), last)
        if stop is not None and not last:
            parser.end()  # what it would say is behind the end; one that waits for more is a cycle
        chunk.events = events
        chunk.text = "".join([event.text for event in events if type(event) is Text])
        chunk.reasoning_tokens = parser.reasoning_tokens
        return stop

    def _feed(self, token: int) -> list[Event]:
        if token in self._hidden:
            return self._parser.feed("", token)
        text = self._detokenizer.add((token,))
        if token not in self._markers:
            return self._parser.feed(text, token)
        # A marker stands alone, whatever bytes were held back before it.
        own = self._tokenizer.token_str(token)
        before = text.removesuffix(own)
        events = self._parser.feed(before, None) if before else []
        return events + self._parser.feed(text[len(before) :], token)

    def _up_to_stop(
        self, matcher: StopMatcher, events: list[Event], tokens: int, last: bool
    ) -> tuple[list[Event], str | None]:
        """The events as far as they may be shown, and the stop string that ended the output, if one did."""
        kept: list[Event] = []
        for event in events:
            if type(event) is not Text:
                _add_text(kept, matcher.release())
                kept.append(event)
                continue
            text, stop = matcher.feed(event.text, tokens=tokens)
            tokens = 0  # they are through
            _add_text(kept, text)
            if stop is not None:
                return kept, stop
        if tokens:
            matcher.feed("", tokens=tokens)
        if last:
            _add_text(kept, matcher.release())
        return kept, None


def _add_text(events: list[Event], text: str) -> None:
    if text:
        events.append(Text(text))
