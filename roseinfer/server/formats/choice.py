"""The growing text of one choice, until it is taken for an event or for the whole answer."""

from dataclasses import dataclass
from typing import Any

from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import TokenLogprobs
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.formats.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, joined
from roseinfer.server.request.job import Job, Kind, Prompt
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.tokenizer import Tokenizer

PromptEntries = list[TokenLogprobs | None]


@dataclass(slots=True)
class Piece:
    """What is new of a choice. `first`: nothing of it was shown before."""

    text: str
    token_ids: list[int]
    entries: list[TokenLogprobs]
    first: bool
    finish: FinishReason | None
    stop_reason: int | str | None


class Choice:
    """Gathers chunks until `take`."""

    def __init__(self, job: Job, prompt: Prompt, index: int, tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        self.index = index
        self.opened = False
        self.prompt_entries: PromptEntries | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._entries: list[TokenLogprobs] = []
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._job = job
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, job.tokens_as_ids)
        self._completion = self._completion_logprobs() if job.kind is Kind.COMPLETION else None

    @property
    def waiting(self) -> int:
        """Tokens since the last `take`."""
        return len(self._token_ids)

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def add(self, chunk: SequenceChunk) -> None:
        if chunk.text:
            self._text.append(chunk.text)
        self._token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self._entries += chunk.logprobs
        if chunk.finish_reason is not None:
            self._finish, self._stop_reason = chunk.finish_reason, chunk.stop_reason

    def take(self) -> Piece:
        first, self.opened = not self.opened, True
        text = "".join(self._text)
        piece = Piece(text, self._token_ids, self._entries, first, self._finish, self._stop_reason)
        self._text, self._token_ids, self._entries = [], [], []
        return piece

    def logprobs(self, piece: Piece, with_prompt: bool = False) -> dict[str, Any] | None:
        """Those of a piece, behind the prompt's if `with_prompt`; None if not asked for. Once per piece, in order."""
        if self._job.logprobs is None:
            return None
        if self._completion is None:
            return chat_logprobs(self._names, self._job.logprobs, piece.entries)
        own = self._completion.render(piece.token_ids, piece.entries)
        return joined(self._echoed(), own) if with_prompt else own

    def _echoed(self) -> dict[str, list[Any]]:
        entries: PromptEntries = self.prompt_entries or [None] * len(self.prompt.ids)
        text = IncrementalDetokenizer(self._tokenizer)
        renderer = CompletionLogprobs(self._names, self._job.logprobs or 0, text)
        return renderer.render(self.prompt.ids, entries)

    def _completion_logprobs(self) -> CompletionLogprobs | None:
        if self._job.logprobs is None:
            return None
        offset = len(self.prompt.text) if self._job.echo else 0
        text = IncrementalDetokenizer(self._tokenizer, self.prompt.params.skip_special_tokens)
        return CompletionLogprobs(self._names, self._job.logprobs, text, offset)


class Choices:
    """The choices of a job, found by (prompt, sample). Prompt logprobs reach every sample of their prompt."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._n = job.n
        self.all = [
            Choice(job, prompt, position * job.n + sample, tokenizer)
            for position, prompt in enumerate(job.prompts)
            for sample in range(job.n)
        ]

    def add(self, prompt: int, chunk: SequenceChunk) -> Choice:
        choice = self.all[prompt * self._n + chunk.index]
        if chunk.prompt_logprobs is not None:
            # Fewer than the prompt has tokens if the time was over before all of it was scored.
            unscored = len(choice.prompt.ids) - len(chunk.prompt_logprobs)
            entries = chunk.prompt_logprobs + [None] * unscored
            for sibling in self.all[prompt * self._n : (prompt + 1) * self._n]:
                sibling.prompt_entries = entries
        choice.add(chunk)
        return choice
