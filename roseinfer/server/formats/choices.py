"""The growing text of each choice, until it is taken for an event or for the whole answer, and tokens by name.

Both ways of answering are fed by `Choices` alone. What turns text into more than text (reasoning, tool calls) belongs
between `Choice.add` and `Choice.take`: then streams and whole answers cannot differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import TokenLogprobs
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.request.job import Job, Prompt
from roseinfer.text.tokenizer import Tokenizer

Entries = Sequence[TokenLogprobs | None]
# JSON has no infinity.
LOWEST = -9999.0


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
    """Gathers the chunks of sample `index` of an answer until `take`."""

    def __init__(self, prompt: Prompt, index: int) -> None:
        self.prompt = prompt
        self.index = index
        self.opened = False
        self.prompt_entries: list[TokenLogprobs | None] | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._entries: list[TokenLogprobs] = []
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def waiting(self) -> int:
        """Tokens since the last `take`."""
        return len(self._token_ids)

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


class Choices:
    """The choices of a job, found by (prompt, sample). Prompt logprobs reach every sample of their prompt."""

    def __init__(self, job: Job) -> None:
        self._n = job.n
        self.all = [
            Choice(prompt, position * job.n + sample)
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


# --- tokens and their log probabilities -------------------------------------------------------------------------
class TokenNames:
    """Tokens as strings: their text, or `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.tokenizer.token_str(token)

    def bytes(self, token: int) -> list[int]:
        return list(self.tokenizer.token_bytes(token))


def about_prompt(job: Job, names: TokenNames, choice: Choice) -> dict[str, Any]:
    """Log probabilities and token ids of the choice's prompt, as far as they were asked for."""
    about: dict[str, Any] = {}
    if job.prompt_logprobs is not None:
        plain = TokenNames(names.tokenizer, as_ids=False)
        entries = choice.prompt_entries or []
        about["prompt_logprobs"] = prompt_logprobs(plain, job.prompt_logprobs, entries)
    if job.return_token_ids:
        about["prompt_token_ids"] = choice.prompt.ids
    return about


def prompt_logprobs(names: TokenNames, top: int, entries: Entries) -> list[dict[str, Any] | None]:
    """Per prompt token: token id -> logprob, rank (1 = likeliest) and text; None for the first token."""
    return [None if entry is None else _by_id(names, top, entry) for entry in entries]


def _by_id(names: TokenNames, top: int, entry: TokenLogprobs) -> dict[str, Any]:
    found = {}
    for position, (token, logprob) in enumerate(first(entry.top, top)):
        found[str(token)] = {"logprob": finite(logprob), "rank": position + 1, "decoded_token": names(token)}
    own = {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": names(entry.token_id)}
    found.setdefault(str(entry.token_id), own)
    return found


def first(top: tuple[tuple[int, float], ...], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest alternatives, all of them for -1."""
    return top if count < 0 else top[:count]


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
