"""Special tokens of harmony, and what the header of a message says.

A message is `<|start|>HEADER<|message|>CONTENT<|end|>`. The header has a role and a channel after `<|channel|>`. A
recipient, `to=NAME`, may follow either, and a type of content the channel. `<|return|>` and `<|call|>` end a message
and the output.
"""

import re
from dataclasses import dataclass

from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import added_token

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ROLE = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
# Recipients that are no tools.
_PEOPLE = frozenset({"assistant", "user", "all"})
# Models glue text to the name of a channel, so its beginning decides.
_CHANNEL = re.compile(rf"\s*({ANALYSIS}|{COMMENTARY}|{FINAL})")
_RECIPIENT = re.compile(r"to=\s*([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """Ids of the special tokens."""

    start: int
    channel: int
    message: int
    constrain: int
    end: int
    ret: int
    call: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "HarmonyTokens | None":
        """Find the tokens by their texts; None if one is missing."""
        ids = []
        for text in (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL):
            id = added_token(tokenizer, text)
            if id is None:
                return None
            ids.append(id)
        return cls(*ids)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a message."""
        return self.end, self.ret, self.call

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end the output, too."""
        return self.ret, self.call


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message. `channel`: a known one or "". `recipient`: as written, "" for none and for people."""

    channel: str
    recipient: str

    @classmethod
    def read(cls, text: str) -> "Header":
        """Read a header, which may be malformed. `text`: with its special tokens as text."""
        channel = _CHANNEL.match(text.rpartition(CHANNEL)[2]) if CHANNEL in text else None
        recipient = _RECIPIENT.search(text)
        to = "" if recipient is None or recipient[1] in _PEOPLE else recipient[1]
        return cls("" if channel is None else channel[1], to)
