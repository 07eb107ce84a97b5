"""The body of an answer that is not streamed."""

import asyncio
from typing import Any

from roseinfer.engine.api import SequenceChunk
from roseinfer.server.formats.choice import Choice, Choices, Piece
from roseinfer.server.formats.logprobs import TokenNames, prompt_logprobs
from roseinfer.server.request.account import Usage
from roseinfer.server.request.job import Job, Kind
from roseinfer.text.tokenizer import Tokenizer


class WholeAnswer:
    """A `Receiver` that collects; `body` when `complete` has returned."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._choices = Choices(job, tokenizer)
        self._names = TokenNames(tokenizer, as_ids=False)
        self._ended = asyncio.Event()
        self._error: Exception | None = None

    def put(self, prompt: int, chunk: SequenceChunk) -> None:
        self._choices.add(prompt, chunk)

    def end(self, error: Exception | None) -> None:
        self._error = error
        self._ended.set()

    async def complete(self) -> None:
        """Raises the error that the generation ends with."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def body(self, usage: Usage) -> dict[str, Any]:
        job = self._job
        render = self._completion if job.kind is Kind.COMPLETION else self._chat
        body = {
            "id": job.id,
            "object": job.kind.whole_object,
            "created": job.created,
            "model": job.model,
            "choices": [render(choice, choice.take()) for choice in self._choices.all],
            "usage": usage.as_dict(),
        }
        if job.kind is Kind.CHAT:
            body |= self._about_prompt(self._choices.all[0])
        if job.warnings:
            body["warnings"] = list(job.warnings)
        return body

    def _completion(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        text = choice.prompt.text + piece.text if self._job.echo else piece.text
        logprobs = choice.logprobs(piece, with_prompt=self._job.echo)
        about = self._about_prompt(choice)
        return {"index": choice.index, "text": text, "logprobs": logprobs} | about | self._how_it_ended(piece)

    def _chat(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        said = {"index": choice.index, "message": message, "logprobs": choice.logprobs(piece)}
        return said | self._how_it_ended(piece)

    def _how_it_ended(self, piece: Piece) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}
        if self._job.return_token_ids:
            end["token_ids"] = piece.token_ids
        return end

    def _about_prompt(self, choice: Choice) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._job.prompt_logprobs is not None:
            entries = choice.prompt_entries or []
            about["prompt_logprobs"] = prompt_logprobs(self._names, self._job.prompt_logprobs, entries)
        if self._job.return_token_ids:
            about["prompt_token_ids"] = choice.prompt.ids
        return about
