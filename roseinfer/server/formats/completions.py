"""POST /v1/completions: from text or token ids to text."""

from collections.abc import Callable, Sequence
from typing import Any

from orjson import dumps

from roseinfer.core.plan import TokenLogprobs
from roseinfer.server.formats.answers import (
    ChoiceBuffer,
    ChoicePart,
    Choices,
    Entries,
    EventEncoder,
    TokenNames,
    WholeBody,
    about_prompt,
    finite,
    first,
)
from roseinfer.server.formats.build_job import OutputSettings, build_job, read_settings
from roseinfer.server.formats.common_job import AnswerKind
from roseinfer.server.formats.constraints import OutputConstraint, is_constrained
from roseinfer.server.formats.sampling import completion_logprobs, completion_max_tokens
from roseinfer.server.formats.schemas import CompletionRequest
from roseinfer.server.http.errors import OPENAI
from roseinfer.server.request.inference import GENERATES, RequestContext, StandardRun
from roseinfer.server.request.job import Job, Usage
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.tokenizer import Tokenizer

COMPLETION = AnswerKind("completions", "cmpl", "prompt")


class CompletionFormat:
    """Format of OpenAI's completions. See `request.inference.AnswerFormat`."""

    path = "/v1/completions"
    dialect = OPENAI
    tasks = GENERATES
    make_run = StandardRun
    request_model = CompletionRequest

    async def make_job(self, call: RequestContext, request: CompletionRequest) -> Job:
        call.offer_request_id(request.request_id)
        prompts = split_prompts(request.prompt)
        max_tokens = completion_max_tokens(request)
        settings = read_settings(call, request, max_tokens, completion_logprobs(request), len(prompts))
        constraint = OutputConstraint(request) if is_constrained(request) else None
        if constraint is not None:
            constraint.start_proof(call.backend.grammars)
        echo = bool(request.echo)
        special = request.add_special_tokens is not False
        encoded = await call.backend.prompts.completion(prompts, special, echo, settings.keep_last)
        output = OutputSettings()
        if constraint is not None:
            guide, ignored = await constraint.guide(call.backend.grammars, settings.n)
            output = OutputSettings(guide, warnings=ignored)
        return await build_job(call, request, settings, encoded, output, COMPLETION, echo)

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> EventEncoder:
        return EventEncoder(job, CompletionWriter(job, tokenizer), usage)

    def whole(self, job: Job, tokenizer: Tokenizer) -> WholeBody:
        return WholeBody(job, CompletionWriter(job, tokenizer))


class CompletionWriter:
    """Writer of choices as texts, after the prompt's with `echo`. See `answers.Writer`."""

    whole_object = chunk_object = "text_completion"
    plain = (b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}]}\n\n')

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, job.tokens_as_ids)
        self._rendered: dict[ChoiceBuffer, CompletionLogprobs] = {}

    def opening(self, choice: ChoiceBuffer) -> None:
        """Return None: clients take the first event for the first token."""

    def delta(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes:
        echo = self._job.echo and piece.first
        logprobs = b"null" if self._job.logprobs is None else dumps(self._logprobs(choice, piece, echo))
        text = dumps(choice.echo_text + piece.text if echo else piece.text)
        ids = b""
        if self._job.return_token_ids:
            ids = b',"token_ids":' + dumps(piece.token_ids)
            if piece.first:
                ids += b',"prompt_token_ids":' + dumps(choice.prompt.ids)
        event = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}'
        return event % (choice.index, text, logprobs, ids)

    def finish(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes:
        assert piece.finish is not None
        event = b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b","stop_reason":%b}'
        return event % (choice.index, piece.finish.value.encode(), dumps(piece.stop_reason))

    def whole(self, choice: ChoiceBuffer, piece: ChoicePart) -> dict[str, Any]:
        text = choice.echo_text + piece.text if self._job.echo else piece.text
        said: dict[str, Any] = {"index": choice.index, "text": text}
        said["logprobs"] = self._logprobs(choice, piece, self._job.echo)
        said |= about_prompt(self._job, self._names, choice)
        said |= {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}
        return said | {"token_ids": piece.token_ids} if self._job.return_token_ids else said

    def about(self, choices: Choices) -> dict[str, Any]:
        """Return nothing: each choice describes its own prompt."""
        return {}

    def _logprobs(self, choice: ChoiceBuffer, piece: ChoicePart, with_prompt: bool) -> dict[str, Any] | None:
        """Return log probabilities of a piece, after the prompt's if `with_prompt`. Call once per piece, in order."""
        top = self._job.logprobs
        if top is None:
            return None
        if choice not in self._rendered:
            offset = len(choice.echo_text) if self._job.echo else 0
            text = IncrementalDetokenizer(self._tokenizer, choice.prompt.params.skip_special_tokens)
            self._rendered[choice] = CompletionLogprobs(self._names, top, text, offset)
        own = self._rendered[choice].render(piece.token_ids, piece.entries)
        return joined(self._echoed(choice, top), own) if with_prompt else own

    def _echoed(self, choice: ChoiceBuffer, top: int) -> dict[str, list[Any]]:
        entries: Entries = choice.prompt_entries or [None] * len(choice.prompt.ids)
        renderer = CompletionLogprobs(self._names, top, IncrementalDetokenizer(self._tokenizer))
        return renderer.render(choice.prompt.ids, entries)


class CompletionLogprobs:
    """Builder of a choice's `logprobs` object, piece by piece. `offset`: where its first token begins in the text.

    A token that completes no character begins where the character does.
    """

    def __init__(self, names: TokenNames, top: int, text: IncrementalDetokenizer, offset: int = 0) -> None:
        self._names = names
        self._top = top
        self._text = text
        self._offset = offset

    def render(self, ids: Sequence[int], entries: Entries) -> dict[str, list[Any]]:
        """Return the object for `ids`. An entry is None for the first token of a prompt."""
        offsets, chosen, tops = [], [], []
        for token, entry in zip(ids, entries, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._text.add([token]))
            chosen.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._alternatives(entry))
        names = [self._names(token) for token in ids]
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops}

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen one. Of equal names the more likely stays."""
        top: dict[str, float] = {}
        for token, logprob in first(entry.top, self._top):
            top.setdefault(self._names(token), finite(logprob))
        top.setdefault(self._names(entry.token_id), finite(entry.logprob))
        return top


def joined(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: a[name] + b[name] for name in a}


# --- prompts ----------------------------------------------------------------------------------------------------
def split_prompts(prompt: str | list[Any]) -> list[Any]:
    """Return the prompts of a completion: a text or a list of ids is one prompt."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
