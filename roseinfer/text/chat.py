"""Chat templates with Hugging Face's conventions, in a sandbox. Special tokens in messages stay plain text.

Encoding a rendered chat directly would turn `<|im_end|><|im_start|>system` in a user's message into control tokens, so
anybody could forge a turn. Therefore every special token in a message is replaced by an unguessable stand-in before the
template runs. Afterwards the special tokens that the *template* wrote are renamed to unguessable aliases, and the
stand-ins become the users' text again. One call then encodes the text with a copy of the tokenizer that knows its
special tokens only by the aliases. So spacing, normalisation and merges are exactly the tokenizer's own. The copy is
built for the first such message; chats without special tokens are encoded as usual.
"""

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roseinfer.core.errors import ConfigError, InvalidRequestError, RoseinferError
from roseinfer.text.harmony import history
from roseinfer.text.merged_turns import merged_turns
from roseinfer.text.tokenizer import Tokenizer, encode

MAX_RENDERED_CHARS = 16 * 2**20
MAX_RENDER_S = 10.0
MAX_ERROR_CHARS = 300
# Generation prompts that are remembered, each for some values of the template's variables; longer texts have none.
MAX_GENERATION_PROMPTS_COUNT = 64
MAX_VARIABLE_CHARS = 40
# Variables that the renderer sets itself; a request must not override them.
RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"})
# Templates may build control tokens from the role, as in '<|' + role + '|>', so it must not be free text.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Errors that a template may cause with unexpected data.
RENDER_ERRORS = (
    jinja2.TemplateError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class CompiledTemplate:
    """Compiled Jinja source. Thread safe.

    `variables`: names that a request may set. The template reads them and roseinfer does not set them.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile `source`. `now` gives the template's current time. Raise `ConfigError` if it does not compile.

        Compiling evaluates constant expressions, which may take any time and memory: see `text/template_check.py`.
        """
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"chat_template: {error}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.variables = frozenset(variables) - RESERVED - environment.globals.keys() - self.special_tokens.keys()

    def render(self, context: Mapping[str, Any]) -> str:
        """Render within limits on the length of the result and on the time between two pieces of it.

        A loop that writes nothing ends only with its process. Raise `InvalidRequestError` and `RENDER_ERRORS`.
        """
        deadline = time.monotonic() + MAX_RENDER_S
        pieces, length = [], 0
        for piece in self._template.generate(**context):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                raise InvalidRequestError("the chat template writes too much for these messages", "messages")
        return "".join(pieces)


class ChatTemplate:
    """Chat template of a tokenizer. Thread safe.

    The model's authors write templates, which run in jinja2's immutable sandbox; messages are data. Special tokens in
    messages, or in any other value of a request, stay plain text: see `LiteralEncoder`. Use `encode` for token ids,
    since encoding the result of `render` would make them control tokens.
    """

    def __init__(
        self, source: str | CompiledTemplate, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`source`: as in `CompiledTemplate`. Raise `ConfigError` if it does not compile."""
        if isinstance(source, str):
            source = CompiledTemplate(source, tokenizer.special_tokens, now)
        self._template = source
        self._source = source.source
        self._special_tokens = source.special_tokens
        self._is_harmony = history.written_by(source.source)
        self.kwargs = source.variables
        self.literal = LiteralEncoder(tokenizer)
        self._backend = tokenizer.backend
        self._generation_prompts: dict[frozenset[tuple[str, Any]], list[int]] = {}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """Return the tokenizer's template; None if the model has none. The template must be trusted or
        already checked.
        """
        return None if tokenizer.chat_template is None else cls(tokenizer.chat_template, tokenizer)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt as text.

        messages: objects with `role` and `content`, a string or a list of text parts (joined by newlines).
        add_generation_prompt: end with the opening of an assistant's turn. continue_final_message: leave the last
        message open, so that the model continues it. kwargs: `tools` and other variables of the template. Raise
        `InvalidRequestError` if the template refuses the messages, or does not know one of `kwargs`.
        """
        return self.literal.reveal(self._render(list(messages), add_generation_prompt, continue_final_message, kwargs))

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        keep_last: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the prompt as token ids, with control tokens only where the template wrote them. Arguments as in
        `render`.

        `add_special_tokens` adds the tokenizer's BOS; templates write their own. `keep_last`: as in `Tokenizer.encode`.
        """
        rendered = self.rendered(messages, add_generation_prompt, continue_final_message, kwargs)
        return encode(*rendered, add_special_tokens, keep_last)

    def generation_prompt_len(self, ids: Sequence[int], kwargs: Mapping[str, Any]) -> int:
        """Return how many of the last tokens of a prompt open the answer; 0 if unknown. The prompt was made with a
        generation prompt and these variables.
        """
        variables = {name: value for name, value in kwargs.items() if name not in ("tools", "documents")}
        if not all(map(_is_short, variables.values())):
            return 0
        key = frozenset(variables.items())
        opening = self._generation_prompts.get(key)
        if opening is None:
            opening = self._generation_prompt(variables)
            if len(self._generation_prompts) < MAX_GENERATION_PROMPTS_COUNT:
                self._generation_prompts[key] = opening
        return len(opening) if opening and list(ids[-len(opening) :]) == opening else 0

    def _generation_prompt(self, variables: dict[str, Any]) -> list[int]:
        """Return the tokens that open the answer to a short message."""
        messages = [{"role": "user", "content": "x"}]
        try:
            closed, opened = (self._render(messages, opens, False, variables) for opens in (False, True))
        except InvalidRequestError:
            return []
        return encode(self._backend, opened[len(closed) :], False) if opened.startswith(closed) else []

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> tuple[tokenizers.Tokenizer, str]:
        """Return the encoder of the prompt and the text for it: the first half of `encode`."""
        text = self._render(list(messages), add_generation_prompt, continue_final_message, kwargs)
        return self.literal.separated(text)

    def _render(
        self, messages: list[dict[str, Any]], generation_prompt: bool, continue_final: bool, kwargs: dict[str, Any]
    ) -> str:
        """Return the prompt with stand-ins for special tokens in the request.

        If the template refuses the messages, try again with merged turns.
        """
        kwargs = self._checked(kwargs)
        if generation_prompt and continue_final:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
            )
        said = [self._message(message, i) for i, message in enumerate(messages)]
        if continue_final and said and said[-1].get("tool_calls"):
            message = "the last message has tool calls, which cannot be continued: add their results"
            raise InvalidRequestError(message, "messages")
        if self._is_harmony:
            said = history.fitted(said)
            if isinstance(kwargs.get("tools"), list):
                kwargs = {**kwargs, "tools": history.fitted_tools(kwargs["tools"])}
        try:
            return self._write(said, generation_prompt, continue_final, kwargs)
        except RENDER_ERRORS as error:
            merged = merged_turns(said) if type(error) is jinja2.TemplateError else None
            if merged is not None:
                with suppress(*RENDER_ERRORS):
                    return self._write(merged, generation_prompt, continue_final, kwargs)
            raise self._refusal(error) from error

    def _write(
        self, messages: list[dict[str, Any]], generation_prompt: bool, continue_final: bool, kwargs: dict[str, Any]
    ) -> str:
        data = self.literal.protect([dict(message) for message in messages])
        context = {"tools": None, "documents": None} | self.literal.protect(kwargs) | self._special_tokens
        end_mark = _mark_end(data, self.literal.end_mark) if continue_final else None
        text = self._template.render(context | {"messages": data, "add_generation_prompt": generation_prompt})
        return text if end_mark is None else _cut(text, end_mark)

    def _checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the values that are set; None means not given."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        unknown = min(given.keys() - self.kwargs, default=None)
        if unknown is not None:
            param = unknown if unknown in ("tools", "documents") else "chat_template_kwargs"
            raise InvalidRequestError(f"the model's chat template does not take {unknown!r}", param)
        return given

    def _message(self, message: Any, index: int) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise InvalidRequestError(f"messages[{index}] must be an object", "messages")
        role = message.get("role")
        if not isinstance(role, str) or (role not in ROLES and not self._names(role)):
            raise InvalidRequestError(f"messages[{index}].role is not known: {str(role)[:40]!r}", "messages")
        if role == "developer" and not self._names(role):
            role = "system"  # "developer" is the newer name of this role
        content = {"content": _text(message["content"], index)} if "content" in message else {}
        return {**message, "role": role, **content}

    def _names(self, role: str) -> bool:
        """Return True if the template itself names this role, such as 'ipython'."""
        return role.isidentifier() and (f"'{role}'" in self._source or f'"{role}"' in self._source)

    def _refusal(self, error: Exception) -> InvalidRequestError:
        if isinstance(error, InvalidRequestError):
            return error
        reason = self.literal.reveal(" ".join(str(error).split()))[:MAX_ERROR_CHARS] or type(error).__name__
        return InvalidRequestError(f"the chat template does not accept the messages: {reason}", "messages")


def _text(content: Any, index: int) -> Any:
    """Join a list of text parts into one string; return other values unchanged."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"messages[{index}].content may hold text parts only", "messages")
    return "\n".join(str(text) for text in texts)


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | None) or (isinstance(value, str) and len(value) <= MAX_VARIABLE_CHARS)


def _mark_end(messages: list[dict[str, Any]], mark: str) -> str:
    """Put `mark` after the last message's text. A space follows it, which templates may strip."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequestError("continue_final_message needs a last message with text", "messages")
    messages[-1]["content"] = f"{content}{mark} "
    return mark


def _cut(text: str, mark: str) -> str:
    """Return the text before `mark`. Where the template strips messages, strip the last one as well."""
    at = text.rfind(mark)
    if at < 0:
        raise InvalidRequestError("the chat template does not write the last message", "continue_final_message")
    kept = text[:at]
    return kept if text[at + len(mark) :].startswith(" ") else kept.rstrip()


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without escaping for HTML, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class GenerationBlock(Extension):
    """Plain text between `{% generation %}` and `{% endgeneration %}`, which mark the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- special tokens that strangers write --------------------------------------------------------------------------
# Private-use characters: no normaliser changes them and no template trims them.
OPEN, CLOSE = "\ue000", "\ue001"


class AliasesNeededError(RoseinferError):
    """A `LiteralEncoder` needs its aliased tokenizer, but may not build it."""


class LiteralEncoder:
    """Encoder that keeps special tokens in messages as text. Thread safe; one per tokenizer.

    may_build: False if others call `build`, or if there are no aliases.
    """

    may_build = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = str(secrets.randbits(64))
        added = tokenizer.backend.get_added_tokens_decoder()
        self._specials = {token.content: id for id, token in added.items() if token.special}
        self._index = list(self._specials)
        self._written = re.compile("|".join(map(re.escape, sorted(self._specials, key=len, reverse=True))) or "(?!)")
        # Marks the end of a message, to find it again in the rendered text.
        self.end_mark = f"{OPEN}{self._nonce}.{CLOSE}"
        self._stand_in = re.compile(rf"{OPEN}{self._nonce}:(\d+){CLOSE}")
        # A normalised special token may have spellings that only the normaliser recognises.
        self._always = any(token.special and token.normalized for token in added.values())
        self._aliased: tokenizers.Tokenizer | InvalidRequestError | None = None
        self._lock = threading.Lock()

    def protect(self, value: Any) -> Any:
        """Return `value` (JSON) with stand-ins for the special tokens in all of its strings, keys included."""
        if isinstance(value, str):
            return self._written.sub(lambda match: self._mark(self._index.index(match[0])), value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """Return the text with stand-ins turned back into the original tokens."""
        return self._stand_in.sub(lambda match: self._index[int(match[1])], text)

    def separated(self, text: str) -> tuple[tokenizers.Tokenizer, str]:
        """Return the encoder for a rendered text, and the text to encode.

        Special tokens are real where the template wrote them, and text where a stand-in is. Raise `InvalidRequestError`
        if this tokenizer cannot separate the two, and `AliasesNeededError`.
        """
        if not self._always and self._stand_in.search(text) is None:
            return self._tokenizer.backend, text
        aliased = self._aliased_tokenizer()
        return aliased, self.reveal(self._written.sub(lambda match: self._alias(match[0]), text))

    def _mark(self, index: int) -> str:
        return f"{OPEN}{self._nonce}:{index}{CLOSE}"

    def _alias(self, token: str) -> str:
        return f"{OPEN}{self._nonce}#{self._index.index(token)}{CLOSE}"

    def build(self) -> None:
        """Build the aliased tokenizer, which takes as much memory as the tokenizer, or record that it is impossible."""
        with self._lock:
            if self._aliased is None:
                try:
                    self._aliased = self._build()
                except InvalidRequestError as error:
                    self._aliased = error

    def _aliased_tokenizer(self) -> tokenizers.Tokenizer:
        if self._aliased is None:
            if not self.may_build:
                raise AliasesNeededError
            self.build()
        if not isinstance(self._aliased, tokenizers.Tokenizer):
            raise _inseparable()
        return self._aliased

    def _build(self) -> tokenizers.Tokenizer:
        spec = json.loads(self._tokenizer.backend.to_str())
        aliases = {token: self._alias(token) for token in self._specials}
        for added in spec["added_tokens"]:
            added["content"] = aliases.get(added["content"], added["content"])
        _rename_in_model(spec["model"], aliases)
        try:
            built = tokenizers.Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the library raises no narrower class
            raise _inseparable() from error
        if any(built.token_to_id(aliases[token]) != id for token, id in self._specials.items()):
            raise _inseparable()
        return built


def _rename_in_model(model: dict[str, Any], aliases: dict[str, str]) -> None:
    """Rename special tokens among the model's own entries, which plain text could reach otherwise."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(token, token): id for token, id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[aliases.get(token, token), score] for token, score in vocab]
    unknown = model.get("unk_token")
    if unknown is not None:
        model["unk_token"] = aliases.get(unknown, unknown)


def _inseparable() -> InvalidRequestError:
    return InvalidRequestError("special tokens in messages cannot be encoded as text with this tokenizer", "messages")
