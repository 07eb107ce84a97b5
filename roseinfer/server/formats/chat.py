"""POST /v1/chat/completions: from messages to a message."""

from collections.abc import Callable, Sequence
from typing import Any

from orjson import dumps

from roseinfer.core.plan import TokenLogprobs
from roseinfer.server.formats import chat_events, tool_messages
from roseinfer.server.formats.answers import (
    ChoiceBuffer,
    ChoicePart,
    Choices,
    EventEncoder,
    TokenNames,
    WholeBody,
    about_prompt,
    finite,
    first,
)
from roseinfer.server.formats.build_job import OutputSettings, build_job, read_settings
from roseinfer.server.formats.chat_output import OUTPUT_FIELDS, ChatOutput
from roseinfer.server.formats.common_job import AnswerKind
from roseinfer.server.formats.pooling.request import EmbeddingRequest
from roseinfer.server.formats.sampling import chat_logprobs
from roseinfer.server.formats.schemas import ChatMessage, ChatRequest, PredictedOutput, TokenizeRequest
from roseinfer.server.http.errors import OPENAI, bad_request
from roseinfer.server.request.inference import GENERATES, RequestContext, StandardRun
from roseinfer.server.request.job import Job, Usage
from roseinfer.server.request.prompts import Encoded, PromptEncoder
from roseinfer.server.request.service import Backend
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.worker.messages import EncodeChat

# Message fields that must not be ignored.
_UNSUPPORTED_IN_MESSAGES = ("function_call", "audio", "images")
# Empty fields of answers that clients send back.
_EMPTY_VALUES: tuple[Any, ...] = (None, [], {})
_PLAIN_FIELDS = frozenset({"role", "content", "name"})
CHAT = AnswerKind("chat", "chatcmpl", "messages")


async def chat_job(call: RequestContext, request: ChatRequest) -> Job:
    """Return the job of a chat. Other APIs translate their requests to chats.

    Raises `ApiError` 400, `InvalidRequestError`.
    """
    call.offer_request_id(request.request_id)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    settings = read_settings(call, request, max_tokens, chat_logprobs(request))
    output = output_of(call.backend, request)
    if output is not None:
        output.answer.start_proof()
    prompt, ignored = await encoded_chat(call.backend, request, settings.keep_last, output)
    settings.warnings.extend(ignored)
    outputs = OutputSettings() if output is None else await output.answer.settings(prompt.ids)
    prediction = () if request.prediction is None else await predicted_ids(call.backend, request.prediction)
    return await build_job(call, request, settings, [prompt], outputs, CHAT, prediction=prediction)


def output_of(backend: Backend, request: ChatRequest) -> ChatOutput | None:
    """Return what a chat asks of its output; None for plain text. Raises `ApiError` 400."""
    if not backend.speech.parses and request.model_fields_set.isdisjoint(OUTPUT_FIELDS):
        return None
    return ChatOutput(backend, request)


async def encoded_chat(
    backend: Backend, request: ChatRequest, keep_last: int | None = None, output: ChatOutput | None = None
) -> tuple[Encoded, list[str]]:
    """Return the prompt and the names of ignored fields. Raises `ApiError` 400, `InvalidRequestError`."""
    messages, ignored = plain_messages(request.messages)
    template = {} if output is None else output.template
    return await backend.prompts.chat(chat_prompt(backend.prompts, request, messages, template, keep_last)), ignored


def chat_prompt(
    prompts: PromptEncoder,
    request: ChatRequest | TokenizeRequest | EmbeddingRequest,
    messages: list[dict[str, Any]],
    output: dict[str, Any],
    keep_last: int | None = None,
    answered: bool = True,
) -> EncodeChat:
    """Return the prompt of a request with plain `messages`. `output`: template variables from the output's fields.

    `keep_last`: tokens to keep at the end of a longer prompt, None = all. `answered`: an answer follows it by default.
    Raises `ApiError` 400.
    """
    variables = request.chat_template_kwargs or {}
    prompts.check_variables(variables)
    generate = request.add_generation_prompt
    return EncodeChat(
        messages,
        add_generation_prompt=answered and not request.continue_final_message if generate is None else generate,
        continue_final_message=bool(request.continue_final_message),
        add_special_tokens=bool(request.add_special_tokens),
        kwargs=prompts.default_variables | output | variables,
        keep_last=keep_last,
        context=prompts.max_model_len,
    )


async def predicted_ids(backend: Backend, prediction: PredictedOutput) -> tuple[int, ...]:
    """Return the tokens of a predicted output; none if the engine does not speculate. Raises as `encoded_chat`."""
    content = prediction.content
    if not isinstance(content, str):
        for part in content:
            _check_part(part, "prediction", "prediction")
        content = "".join(part["text"] for part in content)
    if not content or not backend.info.facts.limits.max_drafts:
        return ()
    return await backend.prompts.prediction(content)


class ChatWriter:
    """Writer of choices as messages. See `answers.Writer`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    plain = (b'{"index":%d,"delta":{"content":', b'},"finish_reason":null}]}\n\n')

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._names = TokenNames(tokenizer, job.tokens_as_ids)

    def opening(self, choice: ChoiceBuffer) -> tuple[bytes, bytes]:
        role = b'{"index":%d,"delta":{"role":"assistant","content":""},"finish_reason":null}' % choice.index
        return role, b',"prompt_token_ids":' + dumps(choice.prompt.ids) if self._job.return_token_ids else b""

    def delta(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes:
        more = b""
        if self._job.logprobs is not None:
            more = b',"logprobs":' + dumps(self._logprobs(piece))
        if self._job.return_token_ids:
            more += b',"token_ids":' + dumps(piece.token_ids)
        delta = b'{"content":%b}' % dumps(piece.text) if piece.events is None else chat_events.delta(piece.events)
        return b'{"index":%d,"delta":%b,"finish_reason":null%b}' % (choice.index, delta, more)

    def finish(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes:
        assert piece.finish is not None
        reason, stop = _finish_reason(piece).encode(), dumps(piece.stop_reason)
        return b'{"index":%d,"delta":{},"finish_reason":"%b","stop_reason":%b}' % (choice.index, reason, stop)

    def whole(self, choice: ChoiceBuffer, piece: ChoicePart) -> dict[str, Any]:
        plain = {"role": "assistant", "content": piece.text}
        message = plain if piece.events is None else chat_events.message(piece.events)
        said: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": self._logprobs(piece)}
        said |= {"finish_reason": _finish_reason(piece), "stop_reason": piece.stop_reason}
        return said | {"token_ids": piece.token_ids} if self._job.return_token_ids else said

    def about(self, choices: Choices) -> dict[str, Any]:
        return about_prompt(self._job, self._names, choices.all[0])

    def _logprobs(self, piece: ChoicePart) -> dict[str, Any] | None:
        return None if self._job.logprobs is None else logprobs_json(self._names, self._job.logprobs, piece.entries)


def _finish_reason(piece: ChoicePart) -> str:
    assert piece.finish is not None
    return "tool_calls" if piece.ended_by_call else piece.finish.value


def logprobs_json(names: TokenNames, top: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {"content": [_chat_entry(names, top, entry) for entry in entries]}


def _chat_entry(names: TokenNames, top: int, entry: TokenLogprobs) -> dict[str, Any]:
    alternatives = [_chat_token(names, token, logprob) for token, logprob in first(entry.top, top)]
    return _chat_token(names, entry.token_id, entry.logprob) | {"top_logprobs": alternatives}


def _chat_token(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names(token), "logprob": finite(logprob), "bytes": names.bytes(token)}


class ChatFormat:
    """Format of OpenAI's chat completions. See `request.inference.AnswerFormat`."""

    path = "/v1/chat/completions"
    dialect = OPENAI
    tasks = GENERATES
    make_run = StandardRun
    request_model = ChatRequest
    make_job = staticmethod(chat_job)

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> EventEncoder:
        return EventEncoder(job, ChatWriter(job, tokenizer), usage)

    def whole(self, job: Job, tokenizer: Tokenizer) -> WholeBody:
        return WholeBody(job, ChatWriter(job, tokenizer))


# --- messages ---------------------------------------------------------------------------------------------------
def plain_messages(messages: list[ChatMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages for the template, and the names of ignored fields. Raises `ApiError` 400."""
    plain, ignored = [], dict[str, None]()
    for position, message in enumerate(messages):
        place = f"messages.{position}"
        for name, value in (message.model_extra or {}).items():
            if name in _UNSUPPORTED_IN_MESSAGES and value:
                raise bad_request(f"{place}.{name} is not supported", "messages", "unsupported_field")
            if value not in _EMPTY_VALUES and name not in _UNSUPPORTED_IN_MESSAGES:
                ignored[f"messages.{name}"[:100]] = None
        more: dict[str, Any] = {}
        if message.role == "tool" or not message.model_fields_set <= _PLAIN_FIELDS:
            more = tool_messages.fields(message, place, ignored)
        plain.append(_plain_message(message, place, more))
    return plain, list(ignored)


def _plain_message(message: ChatMessage, place: str, more: dict[str, Any]) -> dict[str, Any]:
    content = more.pop("content", message.content)
    if content is None and ("tool_calls" in more or "reasoning_content" in more):
        content = ""  # some templates would write "None"
    if content is None:
        raise bad_request(f"{place}.content must be text", "messages")
    if isinstance(content, list):
        content = [_text_part(part, message.role, place) for part in content]
    fields = {"role": message.role, "content": content} | more
    return fields if message.name is None else fields | {"name": message.name}


def _text_part(part: dict[str, Any], role: str, place: str) -> dict[str, Any]:
    """Return a part of type text, an assistant's refusal as one. Raises `ApiError` 400 for other parts."""
    if role == "assistant" and part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    _check_part(part, place)
    return part


def _check_part(part: dict[str, Any], place: str, param: str = "messages") -> None:
    kind = part.get("type")
    if kind != "text":
        shown = str(kind)[:40]
        message = f"{place}.content: parts of type {shown!r} are not supported, only 'text'"
        raise bad_request(message, param, "unsupported_content")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{place}.content: a text part needs its 'text'", param)
