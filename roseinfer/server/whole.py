"""The body of an answer that is not streamed."""

from typing import Any

from roseinfer.engine.api import SequenceChunk
from roseinfer.server.account import Usage
from roseinfer.server.choice import Choice, Choices
from roseinfer.server.job import Job, Kind
from roseinfer.server.logprobs import TokenNames, prompt_logprobs
from roseinfer.text.tokenizer import Tokenizer


class WholeAnswer:
    """Collects chunks; `body` when all choices have finished."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._choices = Choices(job, tokenizer)
        self._names = TokenNames(tokenizer, as_ids=False)
        self._ends: dict[int, SequenceChunk] = {}

    def feed(self, prompt: int, chunk: SequenceChunk) -> None:
        choice = self._choices.add(prompt, chunk)
        if chunk.finish_reason is not None:
            self._ends[choice.index] = chunk

    def body(self, usage: Usage) -> dict[str, Any]:
        job = self._job
        render = self._completion if job.kind is Kind.COMPLETION else self._chat
        body = {
            "id": job.id,
            "object": job.kind.whole_object,
            "created": job.created,
            "model": job.model,
            "choices": [render(choice) | self._end(choice) for choice in self._choices.all],
            "usage": usage.as_dict(),
        }
        if job.kind is Kind.CHAT:
            body |= self._about_prompt(self._choices.all[0])
        if job.warnings:
            body["warnings"] = list(job.warnings)
        return body

    def _completion(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        if self._job.echo:
            text = choice.prompt.text + text
        logprobs = choice.logprobs(with_prompt=self._job.echo)
        return {"index": choice.index, "text": text, "logprobs": logprobs} | self._about_prompt(choice)

    def _chat(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text)}
        return {"index": choice.index, "message": message, "logprobs": choice.logprobs()}

    def _end(self, choice: Choice) -> dict[str, Any]:
        chunk = self._ends[choice.index]
        end: dict[str, Any] = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
        if self._job.return_token_ids:
            end["token_ids"] = choice.token_ids
        return end

    def _about_prompt(self, choice: Choice) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._job.prompt_logprobs is not None:
            entries = choice.prompt_entries or []
            about["prompt_logprobs"] = prompt_logprobs(self._names, self._job.prompt_logprobs, entries)
        if self._job.return_token_ids:
            about["prompt_token_ids"] = choice.prompt.ids
        return about
