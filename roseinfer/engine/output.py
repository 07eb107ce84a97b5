"""Conversion of engine outputs to chunks: text, stop strings, parsed events, ends."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from roseinfer.core.errors import OutputTextError, RequestFailedError, request_failure
from roseinfer.core.outputs import (
    DraftRun,
    DraftTally,
    End,
    FinishReason,
    FirstToken,
    RequestTimes,
    SequenceOutput,
    accepted_of,
)
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.output import Event, OutputParser, Text
from roseinfer.text.stop import StopMatcher
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class SequenceText:
    """Converter of one sequence's outputs to chunks with incremental text and stop strings.

    `ids`: its tokens so far.
    """

    def __init__(self, index: int, params: SequenceParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.ended = False
        self.ids: list[int] = []
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = _matcher(params) if params.stop else None
        self._started: FirstToken | None = None
        self._shift_s: float | None = None
        self._drafts: dict[str, DraftTally] = {}
        self.begin_on_engine()

    @property
    def ttft_s(self) -> float:
        """Seconds from the request's arrival to the first token; 0 before that."""
        return self._started.first_token_s - self._started.arrival_s if self._started else 0.0

    def begin_on_engine(self) -> None:
        """Prepare for output of an engine, the first one or another. Output so far is kept.

        Without a token so far, the engine computes the prompt again. So prompt log probabilities are dropped.
        """
        self._shift_s = None
        if self.ids:
            return
        # The first prompt token has none, and so a prompt of one token has nothing but that.
        wanted = self.index == 0 and self._params.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wanted else None

    def drop(self) -> None:
        """Release what an unread rest of the output holds."""

    def take(self, output: SequenceOutput, now_s: float, shift_s: float = 0.0) -> SequenceChunk | None:
        """Return the chunk for an output; None while prompt log probabilities gather.

        `now_s`: when the engine sent it. `shift_s` converts the engine's times to our clock. The shift of the first
        output is used for all: later ones also contain the delay of their messages.

        A matched stop string sets `ended` before the engine knows; the caller then aborts the sequence.
        """
        assert not self.ended, "a sequence ends once"
        if self._shift_s is None:
            self._shift_s = shift_s
        if self._matcher is not None and len(output.token_ids) > 1:
            return self._take_each(output, now_s)
        if output.prompt_logprobs:
            assert self._prompt_logprobs is not None, "sample 0 reports them, if asked for, before its first token"
            self._prompt_logprobs += output.prompt_logprobs
        if not output.token_ids and output.end is None:
            return None
        if output.started is not None and self._started is None:  # one that goes on elsewhere has begun before
            cached_tokens, arrival_s, scheduled_s, first_s, why = output.started
            shift_s = self._shift_s
            self._started = FirstToken(
                cached_tokens, arrival_s + shift_s, scheduled_s + shift_s, first_s + shift_s, why
            )
        chunk = SequenceChunk(
            self.index,
            token_ids=list(output.token_ids),
            logprobs=list(output.logprobs) if output.logprobs is not None else None,
            cached_tokens=self._started.cached_tokens if self._started else 0,
        )
        if output.started is not None:
            chunk.why = output.started.why
        chunk.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self.ids += output.token_ids
        chunk.num_output_tokens = len(self.ids)
        if output.drafts:
            self._count_drafts(chunk, output.drafts, len(output.token_ids))
        self._add_text(chunk, output, now_s + self._shift_s, self._shift_s)
        return chunk

    def _take_each(self, output: SequenceOutput, now_s: float) -> SequenceChunk | None:
        """Take the tokens one by one, because a stop string may be complete before the last of them."""
        chunk: SequenceChunk | None = None
        kept = 0
        for part in _one_by_one(output):
            taken = self.take(part, now_s)
            chunk = taken if chunk is None or taken is None else merge(chunk, taken)
            kept += 1
            if self.ended:
                break
        if chunk is not None and output.drafts:
            self._count_drafts(chunk, output.drafts, kept)
        return chunk

    def _count_drafts(self, chunk: SequenceChunk, drafts: tuple[DraftRun, ...], kept: int) -> None:
        """Count the drafts of a row. Right ones after a stop string are no output, so they are not accepted."""
        counts = dict(self._drafts)  # the last chunk has the earlier ones
        for proposer, tally in accepted_of(drafts, kept):
            drafted, accepted = counts.get(proposer, DraftTally())
            counts[proposer] = DraftTally(drafted + tally.drafted, accepted + tally.accepted)
        chunk.drafts = self._drafts = counts

    def _add_text(self, chunk: SequenceChunk, output: SequenceOutput, now_s: float, shift_s: float) -> None:
        end = output.end
        shown = output.token_ids
        if end is not None and end.stop_token is not None and not self._params.include_stop_str_in_output:
            shown = shown[:-1]
        stop = self._read(chunk, shown, end is not None)
        if stop is not None:
            chunk.finish_reason, chunk.stop_reason = FinishReason.STOP, stop
            chunk.times = self._times(now_s)
        if end is not None:
            self._add_end(chunk, end, shift_s)
        self.ended = chunk.finish_reason is not None

    def _read(self, chunk: SequenceChunk, shown: Sequence[int], last: bool) -> str | None:
        """Set the text of the tokens `shown`; `last` includes text that was held back. Return a stop string that ended
        the output, if one did.
        """
        text = self._detokenizer.add(shown) if shown else ""
        if last:
            text += self._detokenizer.flush()
        if self._matcher is None:
            chunk.text = text
            return None
        chunk.text, stop = self._matcher.feed(text, final=last, tokens=len(chunk.token_ids))
        return stop

    def _times(self, now_s: float) -> RequestTimes | None:
        started = self._started
        return RequestTimes(*started[1:4], finished_s=now_s) if started else None

    def _add_end(self, chunk: SequenceChunk, end: End, shift_s: float) -> None:
        if self._started is None:
            chunk.times = RequestTimes(*[time_s and time_s + shift_s for time_s in end.times])
        else:
            chunk.times = self._times(end.times.finished_s + shift_s)
        chunk.preemptions = end.preemptions
        chunk.rejection = end.rejection
        chunk.why = end.why
        chunk.vector = end.vector
        if chunk.finish_reason is None:
            chunk.finish_reason = end.reason
            if end.stop_token in self._params.stop_token_ids:
                chunk.stop_reason = end.stop_token


class ParsedSequenceText(SequenceText):
    """Converter that adds parsed events to its chunks.

    The parser gets the output token by token, with the special tokens that it asks for. `skip_special_tokens` only
    decides what is shown. Stop strings are matched within consecutive `Text` events.
    """

    def __init__(self, index: int, params: SequenceParams, tokenizer: Tokenizer, parser: OutputParser) -> None:
        super().__init__(index, params, tokenizer)
        self._parser = parser
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._markers = parser.markers
        self._hidden = tokenizer.special_ids - parser.markers if params.skip_special_tokens else frozenset[int]()

    def drop(self) -> None:
        if not self.ended:
            self._parser.end()  # an unfinished parser is a reference cycle

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
            parser.end()  # its events come after the end; an unfinished parser is a reference cycle
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
        # A marker is an event of its own, apart from bytes that were held back before it.
        own = self._tokenizer.token_str(token)
        before = text.removesuffix(own)
        events = self._parser.feed(before, None) if before else []
        return events + self._parser.feed(text[len(before) :], token)

    def _up_to_stop(
        self, matcher: StopMatcher, events: list[Event], tokens: int, last: bool
    ) -> tuple[list[Event], str | None]:
        """Return the events that may be shown, and the stop string that ended the output, if one did."""
        kept: list[Event] = []
        for event in events:
            if type(event) is not Text:
                _append_text(kept, matcher.release())
                kept.append(event)
                continue
            text, stop = matcher.feed(event.text, tokens=tokens)
            tokens = 0  # the matcher has counted them
            _append_text(kept, text)
            if stop is not None:
                return kept, stop
        if tokens:
            matcher.feed("", tokens=tokens)
        if last:
            _append_text(kept, matcher.release())
        return kept, None


def _append_text(events: list[Event], text: str) -> None:
    if text:
        events.append(Text(text))


class ChunkSink(Protocol):
    """The part of `Sink` that delivery calls for each chunk."""

    def put(self, chunk: SequenceChunk) -> None: ...


class DeliveredRequest(Protocol):
    @property
    def sink(self) -> ChunkSink: ...


Delivered = TypeVar("Delivered", bound=DeliveredRequest)


class OutputDelivery(Generic[Delivered]):
    """Turns outputs of an engine into chunks for its requests. Subclasses decide what the end of a sequence means."""

    def __init__(self) -> None:
        self._sequences: dict[str, tuple[Delivered, SequenceText]] = {}

    def _deliver(self, outputs: Iterable[SequenceOutput], now_s: float, shift_s: float = 0.0) -> None:
        """Deliver outputs that the engine sent at `now_s`. `shift_s` converts its times to our clock.

        This runs once per token, so every layer here costs each of them.
        """
        sequences = self._sequences
        aborts: list[str] = []
        for output in outputs:
            found = sequences.get(output.request_id)
            if found is None:
                continue  # cancelled, or moved to another engine
            request, text = found
            if output.end is not None and output.end.reason in _EARLY_ENDS:
                shown = self._end_early(request, text, output)
                if shown is None:
                    continue
                output = shown
            if output.started is not None and text.index == 0:
                self._started(request, output.started)
            try:
                chunk = text.take(output, now_s, shift_s)
            except Exception as error:  # a bug of the model's tokenizer must not end other requests
                log.exception("cannot decode the output of %s", output.request_id)
                self._fail_sample(request, text, output, OutputTextError(error))
                continue
            if chunk is None:
                continue
            if text.ended:
                self._end_sequence(output.request_id, request)
                if output.end is None:
                    aborts.append(output.request_id)
            request.sink.put(chunk)
        if aborts:
            self._abort(aborts)

    def _end_early(self, request: Delivered, text: SequenceText, output: SequenceOutput) -> SequenceOutput | None:
        """Return the output to deliver in place of one that ends a sample early; None = nothing."""
        end = output.end
        assert end is not None
        if end.reason is not FinishReason.ERROR:
            return output
        self._fail_sample(request, text, output, request_failure(end.error or "the request failed"))
        return None

    def _started(self, request: Delivered, started: FirstToken) -> None:
        """Handle the first token of sample 0."""

    def _end_sequence(self, sequence: str, request: Delivered) -> None:
        """Forget a sequence that has ended."""
        del self._sequences[sequence]

    def _fail_sample(
        self, request: Delivered, text: SequenceText, output: SequenceOutput, error: RequestFailedError
    ) -> None:
        """Handle a sample that failed in the engine or cannot be decoded."""
        raise NotImplementedError

    def _abort(self, sequences: list[str]) -> None:
        """Make the engine stop sequences that a stop string has ended."""
        raise NotImplementedError


_EARLY_ENDS = (FinishReason.ERROR, FinishReason.REJECTED)


def _one_by_one(output: SequenceOutput) -> Iterator[SequenceOutput]:
    """Split an output into outputs of one token each, without its drafts."""
    name, token_ids, logprobs, prompt_logprobs, started, end, _ = output
    last = len(token_ids) - 1
    for i, token in enumerate(token_ids):
        yield SequenceOutput(
            name,
            (token,),
            logprobs[i : i + 1] if logprobs is not None else None,
            prompt_logprobs if i == 0 else None,
            started if i == 0 else None,
            end if i == last else None,
        )


def sequence_text(request: GenerateRequest, index: int, tokenizer: Tokenizer) -> SequenceText:
    """Return the converter of sample `index` of a request, with its parser if it has one."""
    if request.parser is None:
        return SequenceText(index, request.prompt.params, tokenizer)
    return ParsedSequenceText(index, request.prompt.params, tokenizer, request.parser())


def _matcher(params: SequenceParams) -> StopMatcher:
    return StopMatcher(params.stop, params.include_stop_str_in_output, params.min_tokens)


def merge(earlier: SequenceChunk, later: SequenceChunk) -> SequenceChunk:
    """Return one chunk for two consecutive ones, for a reader that did not take the first in time.

    The lists of `earlier` grow in place, so that the cost per token does not grow with the unread output.
    """
    earlier.token_ids += later.token_ids
    if earlier.logprobs is not None and later.logprobs is not None:
        earlier.logprobs += later.logprobs
    if earlier.events is not None and later.events is not None:
        earlier.events += later.events
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids,
        logprobs=later.logprobs if earlier.logprobs is None else earlier.logprobs,
        why=later.why or earlier.why,
        drafts=later.drafts or earlier.drafts,
        events=later.events if earlier.events is None else earlier.events,
        prompt_logprobs=earlier.prompt_logprobs if earlier.prompt_logprobs is not None else later.prompt_logprobs,
    )
