"""Results of requests, built from the chunks of their samples."""

import time
from collections.abc import Sequence

from roseinfer.core.outputs import FinishReason, RequestTimes
from roseinfer.core.plan import TokenLogprobs
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprob
from roseinfer.text.tokenizer import Tokenizer


class AnswerBuilder:
    """Result of one request so far. `text`: the prompt's text, if it is known."""

    def __init__(self, request: GenerateRequest, text: str | None, tokenizer: Tokenizer, detokenize: bool) -> None:
        self.request = request
        self.open = request.n
        self._text = text
        self._tokenizer = tokenizer
        self._detokenize = detokenize
        self._samples = [CompletionOutput(i) for i in range(request.n)]
        self._texts: list[list[str]] = [[] for _ in range(request.n)]
        self._times: list[RequestTimes | None] = [None] * request.n
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._cached_tokens = self._preemptions = 0

    def take(self, chunk: SequenceChunk) -> None:
        sample = self._samples[chunk.index]
        self._texts[chunk.index].append(chunk.text)
        sample.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self._add_logprobs(sample, chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = [entry and self._logprobs(entry) for entry in chunk.prompt_logprobs]
        if chunk.index == 0:
            self._cached_tokens = chunk.cached_tokens
        sample.why = chunk.why or sample.why
        sample.drafts = chunk.drafts or sample.drafts
        if chunk.finish_reason is not None:
            self._end(sample, chunk)

    def output(self) -> RequestOutput:
        for sample, texts in zip(self._samples, self._texts, strict=True):
            sample.text = "".join(texts) if self._detokenize else ""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._text,
            prompt_token_ids=self.request.prompt.ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=self._samples,
            finished=self.open == 0,
            metrics=self._metrics(),
            num_cached_tokens=self._cached_tokens,
        )

    @property
    def output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self._samples)

    def _end(self, sample: CompletionOutput, chunk: SequenceChunk) -> None:
        self.open -= 1
        self._times[sample.index] = chunk.times
        self._preemptions += chunk.preemptions
        sample.finish_reason, sample.stop_reason = chunk.finish_reason, chunk.stop_reason
        sample.rejection = chunk.rejection
        if chunk.finish_reason is FinishReason.ERROR:
            sample.error, sample.stop_reason = str(chunk.stop_reason), None

    def _add_logprobs(self, sample: CompletionOutput, entries: Sequence[TokenLogprobs]) -> None:
        if sample.logprobs is None:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
        assert sample.cumulative_logprob is not None
        sample.logprobs += map(self._logprobs, entries)
        sample.cumulative_logprob += sum(entry.logprob for entry in entries)

    def _logprobs(self, entry: TokenLogprobs) -> TokenLogprob:
        """Return log probabilities by token id: first the chosen token, then the most likely ones."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._spell(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            if token != entry.token_id:
                found[token] = Logprob(logprob, rank, self._spell(token))
        return found

    def _spell(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")

    def _metrics(self) -> RequestMetrics:
        """Return the times on the wall clock. A sample that failed in the engine has none."""
        known = [times for times in self._times if times is not None]
        shift_s = time.time() - time.monotonic()
        if not known:
            return RequestMetrics(shift_s + time.monotonic(), num_generation_tokens=self.output_tokens)
        first = known[0]
        finished_s = max(times.finished_s for times in known)
        started = [times for times in known if times.first_token_s]
        return RequestMetrics(
            arrival_time=first.arrival_s + shift_s,
            first_scheduled_time=first.scheduled_s + shift_s if first.scheduled_s else None,
            first_token_time=min(times.first_token_s for times in started) + shift_s if started else None,
            last_token_time=max(times.finished_s for times in started) + shift_s if started else None,
            finished_time=finished_s + shift_s,
            time_in_queue=first.scheduled_s - first.arrival_s if first.scheduled_s else None,
            num_generation_tokens=self.output_tokens,
            preemptions=self._preemptions,
        )
