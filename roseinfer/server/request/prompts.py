"""From text, messages or token ids to the token ids that the engine gets, in threads beside the event loop."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.request import context_error
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.tokenizer import Tokenizer

# Text with fewer characters per token of context than this is not looked at before it is tokenised.
PLAUSIBLE_CHARS_PER_TOKEN = 16
# They are fields of their own.
_NO_TEMPLATE_KWARGS = frozenset({"tools", "add_special_tokens", "keep_last"})
# Arguments of `ChatTemplate.encode` that `render` does not have.
_OF_ENCODING = ("add_special_tokens", "keep_last")

Args = ParamSpec("Args")
Result = TypeVar("Result")

MAX_THREADS = 4


class Offload:
    """Runs what would hold up the event loop (tokenising, templates, long answers) in a few threads.

    The queue in front of the threads is bounded by the number of requests that the server admits.
    """

    def __init__(self) -> None:
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="roseinfer-text")

    async def run(self, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Encoded:
    ids: list[int]
    text: str = ""


class PromptEncoder:
    """Tokenises off the event loop."""

    def __init__(self, tokenizer: Tokenizer, offload: Offload, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate.from_tokenizer(tokenizer)
        self.offload = offload
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_token_bytes: int | None = None

    def check_template(self) -> None:
        """Raises `ApiError` 400 if messages cannot become a prompt."""
        if self._template is None:
            raise _no_template()

    @property
    def template_variables(self) -> frozenset[str]:
        """What a request may set of the model's chat template."""
        return frozenset() if self._template is None else self._template.kwargs

    async def completion(
        self,
        prompts: list[str] | list[list[int]],
        add_special_tokens: bool,
        with_text: bool,
        keep_last: int | None = None,
    ) -> list[Encoded]:
        """One entry per prompt, of a longer one its last `keep_last` tokens; `with_text` fills in their texts.

        Raises `InvalidRequestError` or `ApiError` 400.
        """
        for entry in prompts:
            if not isinstance(entry, str):
                self.check_ids(entry, "prompt")
        if not with_text and not isinstance(prompts[0], str):
            return [Encoded(_end(entry, keep_last)) for entry in prompts if not isinstance(entry, str)]
        return await self.offload.run(self._encode_all, prompts, add_special_tokens, keep_last)

    async def text(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self.offload.run(self.tokenizer.encode, text, add_special_tokens)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        kwargs: dict[str, Any],
        output: dict[str, Any] | None = None,
        keep_last: int | None = None,
    ) -> list[int]:
        """`kwargs`: variables of the template that the client names itself; `output`: others, which those go before."""
        if self._template is None:
            raise _no_template()
        known = self._template.kwargs - _NO_TEMPLATE_KWARGS
        unknown = [name for name, value in kwargs.items() if value is not None and name not in known]
        if unknown:
            message = f"chat_template_kwargs: {unknown[0][:100]!r} cannot be set for this model's template"
            raise bad_request(message, "chat_template_kwargs")
        options = (
            (output or {})
            | kwargs
            | {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "add_special_tokens": add_special_tokens,
                "keep_last": keep_last,
            }
        )
        return await self.offload.run(self._encode_chat, self._template, messages, options)

    def check_ids(self, ids: list[int], param: str) -> None:
        if not ids:
            raise bad_request(f"{param} must not be empty", param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            message = f"{param}: token id {wrong} is not within the vocabulary of {self._vocab_size}"
            raise bad_request(message, param)

    def _encode_all(
        self, prompts: list[str] | list[list[int]], add_special_tokens: bool, keep_last: int | None
    ) -> list[Encoded]:
        return [self._encode(prompt, add_special_tokens, keep_last) for prompt in prompts]

    def _encode(self, prompt: str | list[int], add_special_tokens: bool, keep_last: int | None) -> Encoded:
        if not isinstance(prompt, str):
            ids = _end(prompt, keep_last)
            return Encoded(ids, self.tokenizer.decode(ids))
        if keep_last is None:
            self._check_length(prompt)
        ids = self.tokenizer.encode(prompt, add_special_tokens, keep_last)
        if not ids:
            raise bad_request("prompt must not be empty", "prompt")
        was_cut = len(ids) == keep_last
        return Encoded(ids, self.tokenizer.decode(ids) if was_cut else prompt)

    def _encode_chat(
        self, template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> list[int]:
        limit = PLAUSIBLE_CHARS_PER_TOKEN * self._max_model_len
        if options["keep_last"] is None and sum(map(_chars, messages)) > limit:
            # The template decides how much of the messages there will be.
            rendering = {name: value for name, value in options.items() if name not in _OF_ENCODING}
            self._check_length(template.render(messages, **rendering), "messages")
        try:
            return template.encode(messages, **options)
        except InvalidRequestError:
            repaired = with_object_arguments(messages)
            if repaired is None:
                raise
            return template.encode(repaired, **options)

    def _check_length(self, text: str, param: str = "prompt") -> None:
        """Refuses text that no tokenisation could fit into the context, before it costs a tokenisation."""
        if len(text) <= PLAUSIBLE_CHARS_PER_TOKEN * self._max_model_len:
            return
        if self._max_token_bytes is None:
            tokens = range(self.tokenizer.vocab_size)
            self._max_token_bytes = max(len(self.tokenizer.token_bytes(token)) for token in tokens)
        size = len(text.encode(errors="replace"))
        if size > self._max_token_bytes * self._max_model_len:
            but = f"the prompt has {len(text)} characters, more than so many tokens can hold"
            raise context_error(self._max_model_len, but, param, -(-size // self._max_token_bytes))


def _end(ids: list[int], keep_last: int | None) -> list[int]:
    return ids if keep_last is None else ids[-keep_last:]


def _no_template() -> ApiError:
    return bad_request("The model has no chat template; use /v1/completions", "messages", "no_chat_template")


def _chars(message: dict[str, Any]) -> int:
    """Of all texts of a message, keys aside. A loop: how deep calls are nested is a stranger's choice."""
    content = message["content"]
    if isinstance(content, str) and len(message) == 2:
        return len(content)
    chars, left = 0, [value for name, value in message.items() if name != "role"]
    while left:
        value = left.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return chars


def with_object_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The same with `{}` for arguments of tool calls that are no objects, which some templates do not take.

    None if there are no such arguments.
    """
    repaired = [_repaired(message) for message in messages]
    return None if repaired == messages else repaired


def _repaired(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    objects = [f if isinstance(f["arguments"], dict) else f | {"arguments": {}} for f in functions]
    calls = [call | {"function": f} for call, f in zip(message["tool_calls"], objects, strict=True)]
    return message | {"tool_calls": calls}
