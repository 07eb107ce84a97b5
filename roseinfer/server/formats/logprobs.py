"""Log probabilities in the two formats of the API, and in that of `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Any

from roseinfer.core.plan import TokenLogprobs
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.tokenizer import Tokenizer

# JSON has no infinity.
LOWEST = -9999.0

Entries = Sequence[TokenLogprobs | None]


class TokenNames:
    """Tokens as strings: their text, or `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_str(token)

    def bytes(self, token: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token))


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
            chosen.append(None if entry is None else _finite(entry.logprob))
            tops.append(None if entry is None else self._alternatives(entry))
        names = [self._names(token) for token in ids]
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": tops}

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, best first, and the chosen one. Of equal names the likelier stays."""
        top: dict[str, float] = {}
        for token, logprob in _first(entry.top, self._top):
            top.setdefault(self._names(token), _finite(logprob))
        top.setdefault(self._names(entry.token_id), _finite(entry.logprob))
        return top


def joined(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: a[name] + b[name] for name in a}


def chat_logprobs(names: TokenNames, top: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {"content": [_chat_entry(names, top, entry) for entry in entries]}


def _chat_entry(names: TokenNames, top: int, entry: TokenLogprobs) -> dict[str, Any]:
    alternatives = [_chat_token(names, token, logprob) for token, logprob in _first(entry.top, top)]
    return _chat_token(names, entry.token_id, entry.logprob) | {"top_logprobs": alternatives}


def _chat_token(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names(token), "logprob": _finite(logprob), "bytes": names.bytes(token)}


def prompt_logprobs(names: TokenNames, top: int, entries: Entries) -> list[dict[str, Any] | None]:
    """Per prompt token: token id -> logprob, rank (1 = likeliest) and text; None for the first token."""
    return [None if entry is None else _by_id(names, top, entry) for entry in entries]


def _by_id(names: TokenNames, top: int, entry: TokenLogprobs) -> dict[str, Any]:
    found = {}
    for position, (token, logprob) in enumerate(_first(entry.top, top)):
        found[str(token)] = {"logprob": _finite(logprob), "rank": position + 1, "decoded_token": names(token)}
    own = {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": names(entry.token_id)}
    found.setdefault(str(entry.token_id), own)
    return found


def _first(top: tuple[tuple[int, float], ...], count: int) -> tuple[tuple[int, float], ...]:
    return top if count < 0 else top[:count]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
