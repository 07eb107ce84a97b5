"""POST /v1/completions: text or token ids in, text out."""

from collections.abc import Callable, Sequence
from typing import Any

from orjson import dumps

from roseinfer.core.plan import TokenLogprobs
from roseinfer.server.formats.answers import (
    Choice,
    Choices,
    Entries,
    EventEncoder,
    Piece,
    TokenNames,
    WholeBody,
    about_prompt,
    finite,
    first,
)
from roseinfer.server.formats.planning import Draft, given
from roseinfer.server.formats.schemas import CompletionRequest, completion_logprobs, completion_max_tokens, parse
from roseinfer.server.http.errors import OPENAI, bad_request
from roseinfer.server.request.inference import Call
from roseinfer.server.request.job import Job, Usage
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.tokenizer import Tokenizer


class CompletionFormat:
    """OpenAI's completions. See `request.inference.AnswerFormat`."""

    path = "/v1/completions"
    dialect = OPENAI

    async def plan(self, call: Call, body: dict[str, Any]) -> Job:
        """Raises `ApiError` 400 or 404, `InvalidRequestError`."""
        request = parse(CompletionRequest, body)
        call.offer_request_id(request.request_id)
        prompts = split_prompts(request.prompt, call.limits.max_prompts)
        asked = completion_logprobs(request, call.limits)
        draft = Draft(call, request, completion_max_tokens(request), asked, len(prompts))
        constrained = draft.begin_to_constrain()
        echo = bool(request.echo)
        special = given(request.add_special_tokens, True)
        encoded = await call.backend.prompts.completion(prompts, special, echo, draft.keep_last)
        await draft.spell_out()
        await draft.constrain(constrained)
        return draft.job(CompletionWriter.whole_object, "cmpl", encoded, "prompt", echo)

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> EventEncoder:
        return EventEncoder(job, CompletionWriter(job, tokenizer), usage)

    def whole(self, job: Job, tokenizer: Tokenizer) -> WholeBody:
        return WholeBody(job, CompletionWriter(job, tokenizer))


class CompletionWriter:
    """Choices as texts, behind their prompt's with `echo`. See `answers.Writer`."""

    whole_object = chunk_object = "text_completion"
    plain = (b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}]}\n\n')

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, job.tokens_as_ids)
        self._rendered: dict[Choice, CompletionLogprobs] = {}

    def opening(self, choice: Choice) -> None:
        """There is none: clients take the first event for the first token."""

    def delta(self, choice: Choice, piece: Piece) -> bytes:
        echo = self._job.echo and piece.first
        logprobs = b"null" if self._job.logprobs is None else dumps(self._logprobs(choice, piece, echo))
        text = dumps(choice.prompt.text + piece.text if echo else piece.text)
        ids = b""
        if self._job.return_token_ids:
            ids = b',"token_ids":' + dumps(piece.token_ids)
            if piece.first:
                ids += b',"prompt_token_ids":' + dumps(choice.prompt.ids)
        event = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}'
        return event % (choice.index, text, logprobs, ids)

    def finish(self, choice: Choice, piece: Piece) -> bytes:
        assert piece.finish is not None
        event = b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b","stop_reason":%b}'
        return event % (choice.index, piece.finish.value.encode(), dumps(piece.stop_reason))

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        text = choice.prompt.text + piece.text if self._job.echo else piece.text
        said: dict[str, Any] = {"index": choice.index, "text": text}
        said["logprobs"] = self._logprobs(choice, piece, self._job.echo)
        said |= about_prompt(self._job, self._names, choice)
        said |= {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}
        return said | {"token_ids": piece.token_ids} if self._job.return_token_ids else said

    def about(self, choices: Choices) -> dict[str, Any]:
        """Nothing: each choice says what there is to say of its prompt."""
        return {}

    def _logprobs(self, choice: Choice, piece: Piece, with_prompt: bool) -> dict[str, Any] | None:
        """Those of a piece, behind the prompt's if `with_prompt`; None if not asked for. Once per piece, in order."""
        top = self._job.logprobs
        if top is None:
            return None
        if choice not in self._rendered:
            offset = len(choice.prompt.text) if self._job.echo else 0
            text = IncrementalDetokenizer(self._tokenizer, choice.prompt.params.skip_special_tokens)
            self._rendered[choice] = CompletionLogprobs(self._names, top, text, offset)
        own = self._rendered[choice].render(piece.token_ids, piece.entries)
        return joined(self._echoed(choice, top), own) if with_prompt else own

    def _echoed(self, choice: Choice, top: int) -> dict[str, list[Any]]:
        entries: Entries = choice.prompt_entries or [None] * len(choice.prompt.ids)
        renderer = CompletionLogprobs(self._names, top, IncrementalDetokenizer(self._tokenizer))
        return renderer.render(choice.prompt.ids, entries)


class CompletionLogprobs:
    """The `logprobs` object of a completion's choice, piece by piece.

    `offset`: where the first token begins in the choice's text. Tokens that complete no character begin where the
    character does.
    """

    def __init__(self, names: TokenNames, top: int, text: IncrementalDetokenizer, offset: int = 0) -> None:
        self._names = names
        self._top = top
        self._text = text
        self._offset = offset

    def render(self, ids: Sequence[int], entries: Entries) -> dict[str, list[Any]]:
        """`entries` goes with `ids`; None (the first token of a prompt) has no probability."""
        offsets, chosen, tops = [], [], []
        for token, entry in zip(ids, entries, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._text.add([token]))
            chosen.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._alternatives(entry))
        names = [self._names(token) for token in ids]
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops}

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, best first, and the chosen one. Of equal names the likelier stays."""
        top: dict[str, float] = {}
        for token, logprob in first(entry.top, self._top):
            top.setdefault(self._names(token), finite(logprob))
        top.setdefault(self._names(entry.token_id), finite(entry.logprob))
        return top


def joined(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: a[name] + b[name] for name in a}


# --- prompts ----------------------------------------------------------------------------------------------------
def split_prompts(prompt: str | list[Any], limit: int) -> list[Any]:
    """Prompts of a completion: a text or a list of ids is one, a list of these several. Raises `ApiError` 400."""
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts:
        raise bad_request("prompt must not be empty", "prompt")
    if len(prompts) > limit:
        raise bad_request(f"{len(prompts)} prompts, at most {limit} are allowed", "prompt")
    return prompts
