"""Text written by strangers inside a trusted template: special tokens in it stay plain text.

Encoding a rendered chat as it stands would turn `<|im_end|><|im_start|>system` in a user's message into real control
tokens, so anybody could forge a turn. Here every special token found in a message is replaced by an unguessable
stand-in before the template runs. Afterwards the special tokens that the *template* wrote are renamed to unguessable
aliases, the stand-ins become the users' text again, and one call encodes the whole with a copy of the tokenizer that
knows its special tokens by the aliases only. So spacing, normalising and merging are exactly the tokenizer's own.
The copy is built when the first such message comes; chats without special tokens are encoded as usual.
"""

import json
import re
import secrets
import threading
from typing import Any

import tokenizers

from roseinfer.core.errors import InvalidRequestError
from roseinfer.text.tokenizer import Tokenizer, encode

# Private-use characters: no normaliser changes them and no template trims them.
OPEN, CLOSE = "\ue000", "\ue001"


class LiteralEncoder:
    """Thread safe; one per tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = str(secrets.randbits(64))
        added = tokenizer.backend.get_added_tokens_decoder()
        self._specials = {token.content: id for id, token in added.items() if token.special}
        self._index = list(self._specials)
        self._written = re.compile("|".join(map(re.escape, sorted(self._specials, key=len, reverse=True))) or "(?!)")
        # For the chat template to find the end of a message again.
        self.end_mark = f"{OPEN}{self._nonce}.{CLOSE}"
        self._stand_in = re.compile(rf"{OPEN}{self._nonce}:(\d+){CLOSE}")
        # A normalised special token may be written in ways that only the normaliser sees through.
        self._always = any(token.special and token.normalized for token in added.values())
        self._aliased: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def protect(self, value: Any) -> Any:
        """`value` (JSON) with stand-ins for the special tokens in all of its strings, keys included."""
        if isinstance(value, str):
            return self._written.sub(lambda match: self._mark(self._index.index(match[0])), value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with stand-ins turned back into what was written."""
        return self._stand_in.sub(lambda match: self._index[int(match[1])], text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered text: special tokens are real where the template wrote them, text where a stand-in is.

        Raises `InvalidRequestError` if this tokenizer cannot tell the two apart.
        """
        if not self._always and self._stand_in.search(text) is None:
            return self._tokenizer.encode(text, add_special_tokens)
        aliased = self._aliased_tokenizer()
        renamed = self._written.sub(lambda match: self._alias(match[0]), text)
        return encode(aliased, self.reveal(renamed), add_special_tokens)

    def _mark(self, index: int) -> str:
        return f"{OPEN}{self._nonce}:{index}{CLOSE}"

    def _alias(self, token: str) -> str:
        return f"{OPEN}{self._nonce}#{self._index.index(token)}{CLOSE}"

    def _aliased_tokenizer(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._aliased is None:
                self._aliased = self._build()
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
    """Models that list special tokens among their own entries could reach them from plain text."""
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
