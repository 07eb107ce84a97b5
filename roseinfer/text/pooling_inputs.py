"""Inputs of rerankers as token ids: a query and a document, cut to a limit."""

from typing import NamedTuple

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.pooling import PairFormat
from roseinfer.text.chat import LiteralEncoder
from roseinfer.text.tokenizer import Tokenizer, encode

# Prompt of Qwen3-Reranker, from https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
_QWEN3_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairIds(NamedTuple):
    """Query and document as one prompt. `second_text_from`: first token of the document, for models that number the
    texts of a pair; 0 for others.
    """

    ids: list[int]
    second_text_from: int = 0


class PairEncoder:
    """Encoder of pairs for one tokenizer and the form that its model expects. Thread safe.

    `literal`: the tokenizer's own, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer, form: PairFormat, literal: LiteralEncoder | None = None) -> None:
        self._tokenizer = tokenizer
        self._form = form
        if form is PairFormat.QWEN3_RERANKER:
            self._literal = literal or LiteralEncoder(tokenizer)
            self._before, self._after = (
                tokenizer.encode(text, add_special_tokens=False) for text in (_QWEN3_BEFORE, _QWEN3_AFTER)
            )

    def prepare(self) -> None:
        """Build what the first text with a special token needs. That takes seconds for a large vocabulary."""
        if self._form is PairFormat.QWEN3_RERANKER:
            self._literal.build()

    def encode(self, query: str, document: str, instruction: str | None = None, limit: int | None = None) -> PairIds:
        """Return a pair as one prompt of at most `limit` tokens; the end of the document is cut.

        `instruction`: task of a reranker that takes one; None = retrieval for web search. Special tokens in the texts
        of Qwen3-Reranker stay text. Raise `InvalidRequestError` for an instruction that the model does not take, for
        texts that cannot be encoded, and for a limit without room for the document.
        """
        if self._form is PairFormat.QWEN3_RERANKER:
            return self._conversation(query, document, instruction or DEFAULT_INSTRUCTION, limit)
        if instruction:
            raise InvalidRequestError("instruction is not supported by this model", "instruction")
        return self._pair(query, document, limit)

    def _conversation(self, query: str, document: str, instruction: str, limit: int | None) -> PairIds:
        # Without the document first: its tokens are the same, as the space before it belongs to them.
        written = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        encoder, text = self._literal.separated(self._literal.protect(written))
        ids = encode(encoder, text, add_special_tokens=False)
        room = None if limit is None else limit - len(self._before) - len(self._after)
        if room is not None and len(ids) > room:
            bare_encoder, bare = self._literal.separated(self._literal.protect(written[: len(written) - len(document)]))
            if room <= len(encode(bare_encoder, bare, add_special_tokens=False)):
                raise _no_room(limit)
            ids = ids[:room]
        return PairIds([*self._before, *ids, *self._after])

    def _pair(self, query: str, document: str, limit: int | None) -> PairIds:
        ids, types = self._encode_both(query, document)
        if limit is not None and len(ids) > limit:
            kept = len(self._tokenizer.encode(document, add_special_tokens=False)) - (len(ids) - limit)
            if kept < 1:
                raise _no_room(limit)
            ids, types = self._cut(query, document, kept)
        return PairIds(ids, types.index(1) if 1 in types else 0)

    def _cut(self, query: str, document: str, kept: int) -> tuple[list[int], list[int]]:
        """Encode a pair with the first `kept` tokens of the document only."""
        backend = self._tokenizer.backend
        first, second = (backend.encode(text, add_special_tokens=False) for text in (query, document))
        second.truncate(kept)
        both = backend.post_process(first, second)
        return both.ids, both.type_ids

    def _encode_both(self, query: str, document: str) -> tuple[list[int], list[int]]:
        try:
            (both,) = self._tokenizer.backend.encode_batch([(query, document)])
        except TypeError as error:
            raise InvalidRequestError("a text holds lone surrogates, which are not valid Unicode", "query") from error
        return both.ids, both.type_ids


def _no_room(limit: int | None) -> InvalidRequestError:
    return InvalidRequestError(f"a limit of {limit} tokens leaves no room for the document", "truncate_prompt_tokens")
