"""From token ids to text: what happens to a sequence's output between the engine and its reader."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roseinfer.core.outputs import End, FinishReason, RequestOutput, RequestTimes, Started
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.stop import StopMatcher
from roseinfer.text.tokenizer import Tokenizer


class SequenceText:
    """Turns one sequence's outputs into chunks: incremental text, stop strings, the right end.

    `ids`: the tokens that it has had so far.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.ended = False
        self.ids: list[int] = []
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = _matcher(params) if params.stop else None
        self._started: Started | None = None
        self._shift_s: float | None = None
        self.restart()

    @property
    def ttft_s(self) -> float:
        """From the request's arrival to the first token, in seconds; 0 before that."""
        return self._started.first_token_s - self._started.arrival_s if self._started else 0.0

    def restart(self) -> None:
        """An engine gets it: what has been gathered of another that did not live to put out a token is void."""
        self._shift_s = None
        if self.ids:
            return
        # The first prompt token has none, and so a prompt of one token has nothing but that.
        wanted = self.index == 0 and self._params.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wanted else None

    def drop(self) -> None:
        """Nobody reads on."""

    def take(self, output: RequestOutput, now_s: float, shift_s: float = 0.0) -> SequenceChunk | None:
        """The chunk to show for an output; None if there is nothing to show yet (prompt log probabilities gather).

        `now_s`: when the engine sent it. `shift_s` makes times of our clock out of the engine's. That of its
        first output counts for all: later ones differ by what their messages waited, which is no time of the engine's.

        After a stop string has matched, `ended` is set although the engine does not know it yet: the caller aborts.
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
            self._started = Started(cached_tokens, arrival_s + shift_s, scheduled_s + shift_s, first_s + shift_s, why)
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
        self._add_text(chunk, output, now_s + self._shift_s, self._shift_s)
        return chunk

    def _take_each(self, output: RequestOutput, now_s: float) -> SequenceChunk | None:
        """A stop string may be complete before the last token: the output ends there, as if one came a step."""
        chunk: SequenceChunk | None = None
        for part in _one_by_one(output):
            taken = self.take(part, now_s)
            chunk = taken if chunk is None or taken is None else merge(chunk, taken)
            if self.ended:
                break
        return chunk

    def _add_text(self, chunk: SequenceChunk, output: RequestOutput, now_s: float, shift_s: float) -> None:
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
        """Sets what the tokens `shown` say, with what was held back if they are the `last`. Returns the stop string
        that ended the output, if one did.
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
        if chunk.finish_reason is None:
            chunk.finish_reason = end.reason
            if end.stop_token in self._params.stop_token_ids:
                chunk.stop_reason = end.stop_token


def _one_by_one(output: RequestOutput) -> Iterator[RequestOutput]:
    """The same in outputs of one token each."""
    name, token_ids, logprobs, prompt_logprobs, started, end = output
    last = len(token_ids) - 1
    for i, token in enumerate(token_ids):
        yield RequestOutput(
            name,
            (token,),
            logprobs[i : i + 1] if logprobs is not None else None,
            prompt_logprobs if i == 0 else None,
            started if i == 0 else None,
            end if i == last else None,
        )


def _matcher(params: SamplingParams) -> StopMatcher:
    return StopMatcher(params.stop, params.include_stop_str_in_output, params.min_tokens)


def merge(earlier: SequenceChunk, later: SequenceChunk) -> SequenceChunk:
    """One chunk that says what two in a row say, for a reader that was too slow to take the first.

    The lists of `earlier` grow in place: a reader that takes nothing for long must not cost more with each token.
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
        events=later.events if earlier.events is None else earlier.events,
        prompt_logprobs=earlier.prompt_logprobs if earlier.prompt_logprobs is not None else later.prompt_logprobs,
    )
