"""Prompts of requests: text, messages or token ids become token ids, off the event loop."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.request import context_error
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.server.text_work.texts import Texts
from roseinfer.text.worker.messages import Decoded as DecodedText
from roseinfer.text.worker.messages import DecodeIds, EncodeChat, EncodeTexts, Listed, ListTokens, TextIds
from roseinfer.text.worker.perform import MAX_PLAUSIBLE_CHARS_PER_TOKEN, SPARE_TOKENS, check_length

# These have request fields of their own.
_NO_TEMPLATE_KWARGS = frozenset({"tools", "add_special_tokens", "keep_last"})
# Cost of a token id in characters of text.
ID_CHARS = 4
# Cost of each entry of an object or a list, besides its content.
NODE_CHARS = 8


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a prompt, its text if that was requested, and `Prompt.generation_prompt_len`."""

    ids: list[int]
    text: str = ""
    generation_prompt_len: int = 0


class PromptEncoder:
    """Encoder of prompts."""

    def __init__(
        self, texts: Texts, max_model_len: int, vocab_size: int, default_variables: Mapping[str, Any] | None = None
    ) -> None:
        """`default_variables`: variables of the chat template for chats that do not set them.

        Raise `ConfigError` if the chat template does not compile, unless `texts` have been started; also if it reads
        one of the default variables nowhere.
        """
        self.default_variables = dict(default_variables or {})
        self._texts = texts
        self._facts = texts.facts
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        unread = sorted(self.default_variables.keys() - (self.template_variables - _NO_TEMPLATE_KWARGS))
        if unread:
            raise ConfigError(f"default_chat_template_kwargs: the model's chat template does not read {unread[0]!r}")

    def check_template(self) -> None:
        """Raise `ApiError` 400 without a chat template."""
        if self._facts.variables is None:
            raise _no_template()

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the model's chat template reads."""
        return self._facts.variables or frozenset()

    async def completion(
        self,
        prompts: list[str] | list[list[int]],
        add_special_tokens: bool,
        with_text: bool,
        keep_last: int | None = None,
    ) -> list[Encoded]:
        """Return one entry per prompt, cut to its last `keep_last` tokens. `with_text` fills in their texts.

        Raises `InvalidRequestError`, `TokenizerFailedError`, `ApiError` 400 or 503.
        """
        for entry in prompts:
            if not isinstance(entry, str):
                self.check_ids(entry, "prompt")
        if not with_text and not isinstance(prompts[0], str):
            return [Encoded(_end(entry, keep_last)) for entry in prompts if not isinstance(entry, str)]
        plausible = [self._plausible(entry, keep_last) for entry in prompts]
        job = EncodeTexts(plausible, add_special_tokens, with_text, keep_last, self.max_model_len)
        done = await self._texts.perform(job, sum(map(_size, plausible)))
        assert isinstance(done, TextIds)
        all_ids = done.lists()
        if not all(all_ids):
            raise bad_request("prompt must not be empty", "prompt")
        texts = done.texts or [""] * len(all_ids)
        return [Encoded(ids, text) for ids, text in zip(all_ids, texts, strict=True)]

    async def chat(self, prompt: EncodeChat) -> Encoded:
        """Return the prompt of a chat, without its text. Raises as `completion`."""
        done = await self._texts.perform(prompt, self._chat_chars(prompt))
        assert isinstance(done, TextIds)
        return Encoded(done.lists()[0], generation_prompt_len=done.generation_prompt_len)

    async def prediction(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a predicted output, as many as the context has. Raises as `completion`."""
        check_length(text, self.max_model_len, self._facts.max_token_bytes, "prediction", "the prediction")
        done = await self._texts.perform(EncodeTexts([text], add_special_tokens=False), len(text))
        assert isinstance(done, TextIds)
        return tuple(done.lists()[0][: self.max_model_len])

    async def listed_text(self, text: str, add_special_tokens: bool, with_strings: bool) -> Listed:
        """Return the tokens of a text. Raises as `completion`."""
        check_length(text, self.max_model_len, self._facts.max_token_bytes, "prompt")
        return await self._listed(EncodeTexts([text], add_special_tokens), len(text), with_strings)

    async def listed_chat(self, prompt: EncodeChat, with_strings: bool) -> Listed:
        """Return the tokens of a chat. Raises as `completion`."""
        return await self._listed(prompt, self._chat_chars(prompt), with_strings)

    async def text(self, ids: list[int]) -> str:
        """Return the text of token ids. Raises as `completion`."""
        if len(ids) > self.max_model_len:
            raise context_error(self.max_model_len, f"there are {len(ids)} tokens", "tokens")
        done = await self._texts.perform(DecodeIds(ids), ID_CHARS * len(ids))
        assert isinstance(done, DecodedText)
        return done.text

    @property
    def max_token_bytes(self) -> int:
        return self._facts.max_token_bytes

    def check_ids(self, ids: list[int], param: str, shown: str | None = None) -> None:
        """Raise `ApiError` 400 without ids, or with one outside the vocabulary. `shown`: their name in the error."""
        shown = shown or param
        if not ids:
            raise bad_request(f"{shown} must not be empty", param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            message = f"{shown}: token id {wrong} is not within the vocabulary of {self._vocab_size}"
            raise bad_request(message, param)

    async def _listed(self, prompt: EncodeTexts | EncodeChat, chars: int, with_strings: bool) -> Listed:
        done = await self._texts.perform(ListTokens(prompt, with_strings, self.max_model_len), chars)
        assert isinstance(done, Listed)
        return done

    def _plausible(self, prompt: str | list[int], keep_last: int | None) -> str | list[int]:
        """Return the prompt if it may fit the context; if truncated, the part that may be kept."""
        if keep_last is None:
            if isinstance(prompt, str):
                check_length(prompt, self.max_model_len, self._facts.max_token_bytes, "prompt")
            elif len(prompt) > self.max_model_len:
                raise context_error(self.max_model_len, f"the prompt has {len(prompt)} tokens", "prompt", len(prompt))
            return prompt
        if isinstance(prompt, str):
            return prompt[-self._facts.max_token_bytes * (keep_last + SPARE_TOKENS) :]
        return prompt[-keep_last:]

    def check_variables(self, variables: dict[str, Any]) -> None:
        """Raise `ApiError` 400 without a chat template, and for a variable that a request may not set."""
        self.check_template()
        known = self.template_variables - _NO_TEMPLATE_KWARGS
        unknown = [name for name, value in variables.items() if value is not None and name not in known]
        if unknown:
            message = f"chat_template_kwargs: {unknown[0][:100]!r} cannot be set for this model's template"
            raise bad_request(message, "chat_template_kwargs")

    def _chat_chars(self, prompt: EncodeChat) -> int:
        """Return the number of characters of a chat. Raises `RequestTooLongError`."""
        if prompt.keep_last is None:
            self._check_contents(prompt.messages)
        return sum(map(_chars, prompt.messages)) + (_chars(prompt.kwargs) if prompt.kwargs else 0)

    def _check_contents(self, messages: Iterable[dict[str, Any]]) -> None:
        """Check the length before rendering. Reasoning does not count: templates may leave it out."""
        texts = [text for message in messages for text in _texts(message["content"])]
        if sum(map(len, texts)) > MAX_PLAUSIBLE_CHARS_PER_TOKEN * self.max_model_len:
            check_length("".join(texts), self.max_model_len, self._facts.max_token_bytes, "messages")


def _end(ids: list[int], keep_last: int | None) -> list[int]:
    return ids if keep_last is None else ids[-keep_last:]


def _size(prompt: str | Sequence[int]) -> int:
    return len(prompt) if isinstance(prompt, str) else ID_CHARS * len(prompt)


def _no_template() -> ApiError:
    return bad_request("The model has no chat template; use /v1/completions", "messages", "no_chat_template")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content] if isinstance(content, list) else []


def _chars(message: dict[str, Any]) -> int:
    """Estimate the characters of a message. A loop, because clients choose the depth of nesting."""
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2:
        return len(content)
    chars, left = 0, [value for name, value in message.items() if name != "role"]
    while left:
        value = left.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, dict):
            chars += sum(map(len, value)) + NODE_CHARS * len(value)
            left += value.values()
        elif isinstance(value, list):
            chars += NODE_CHARS * len(value)
            left += value
    return chars
