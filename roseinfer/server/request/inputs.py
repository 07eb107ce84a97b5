"""Inputs of prompt-only requests: many texts become token ids, off the event loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from roseinfer.core.errors import InvalidRequestError, RequestTooLongError
from roseinfer.core.pooling import PairFormat
from roseinfer.core.request import context_error
from roseinfer.server.http.errors import bad_request
from roseinfer.server.request.prompts import PromptEncoder
from roseinfer.server.text_work.texts import SHORT_CHARS, Texts
from roseinfer.text.pooling_inputs import PairIds
from roseinfer.text.worker.messages import EncodePairs, EncodeTexts, TextIds
from roseinfer.text.worker.perform import SPARE_TOKENS, check_length

Text = TypeVar("Text", str, tuple[str, str])


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cut of longer inputs to `keep` tokens: the first ones, or the last ones if `at_start`."""

    keep: int
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class InputName:
    """Name of inputs in errors: `input 3`, or `input` alone if there is only one. `field`: of the request."""

    field: str
    several: bool

    def of(self, position: int) -> str:
        return f"{self.field} {position}" if self.several else self.field


class InputEncoder:
    """Encoder of the inputs of one model. An error names the position of its input."""

    def __init__(self, texts: Texts, prompts: PromptEncoder) -> None:
        self._texts = texts
        self._prompts = prompts

    async def texts(
        self, texts: Sequence[str], special: bool, cut: Truncation | None, name: InputName, before: str = ""
    ) -> list[list[int]]:
        """Return the token ids of texts. `special`: add the tokenizer's special tokens; `before`: text before each one.

        Raises `InvalidRequestError`, `TokenizerFailedError`, `ApiError` 400 or 503.
        """
        found: list[list[int]] = []
        whole = [self._plausible(text, before, cut, name.of(i), name.field) for i, text in enumerate(texts)]
        for batch in _batches(whole, len):
            found += await self._batch(batch, special, cut, name, len(found))
        for i, ids in enumerate(found):
            self._check(ids, name.of(i), name.field)
        return found

    async def pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        form: PairFormat,
        instruction: str | None,
        cut: Truncation | None,
        field: str,
    ) -> list[PairIds]:
        """Return the token ids of queries with documents, none of them empty. `field`: of the documents.

        Raises as `texts`.
        """
        context, token_bytes = self._prompts.max_model_len, self._prompts.max_token_bytes
        for i, (query, document) in enumerate(pairs):
            if cut is None:
                check_length(query + document, context, token_bytes, field, f"pair {i}")
        found: list[PairIds] = []
        for batch in _batches(pairs, lambda pair: len(pair[0]) + len(pair[1])):
            job = EncodePairs(batch, form, instruction, None if cut is None else cut.keep, len(found))
            done = await self._texts.perform(job, sum(len(query) + len(document) for query, document in batch))
            assert isinstance(done, TextIds)
            found += map(PairIds, done.lists(), done.second_from)
        for i, pair in enumerate(found):
            self._check(pair.ids, f"pair {i}", field)
        return found

    def ids(self, inputs: Sequence[list[int]], cut: Truncation | None, name: InputName) -> list[list[int]]:
        """Return inputs that are token ids already, checked and cut. Raises as `texts`."""
        found = []
        for i, ids in enumerate(inputs):
            self._prompts.check_ids(ids, name.field, name.of(i))
            kept = ids if cut is None else ids[-cut.keep :] if cut.at_start else ids[: cut.keep]
            self._check(kept, name.of(i), name.field)
            found.append(kept)
        return found

    def _plausible(self, text: str, before: str, cut: Truncation | None, shown: str, field: str) -> str:
        """Return the text if it may fit the context; if truncated, the part that may be kept."""
        if not text:
            raise bad_request(f"{shown} must not be empty", field)
        text = before + text
        if cut is None:
            check_length(text, self._prompts.max_model_len, self._prompts.max_token_bytes, field, shown)
            return text
        chars = self._prompts.max_token_bytes * (cut.keep + SPARE_TOKENS)
        return text[-chars:] if cut.at_start else text[:chars]

    async def _batch(
        self, texts: list[str], special: bool, cut: Truncation | None, name: InputName, first: int
    ) -> list[list[int]]:
        job = EncodeTexts(list(texts), special, context=self._prompts.max_model_len)
        if cut is not None:
            job.keep_last, job.keep_first = (cut.keep, None) if cut.at_start else (None, cut.keep)
        try:
            done = await self._texts.perform(job, sum(map(len, texts)))
        except InvalidRequestError as error:
            raise self._named(error, name.of(first), name.field) from error
        assert isinstance(done, TextIds)
        return done.lists()

    def _named(self, error: InvalidRequestError, shown: str, field: str) -> InvalidRequestError:
        """Return an error of text work, which names no input. `shown`: the first text of its batch."""
        if isinstance(error, RequestTooLongError):
            but = f"{shown} has more than {error.prompt_tokens} tokens"
            return context_error(self._prompts.max_model_len, but, field, error.prompt_tokens)
        return InvalidRequestError(f"{shown}: {error.message}", field, error.code)

    def _check(self, ids: list[int], shown: str, field: str) -> None:
        if not ids:
            raise bad_request(f"{shown} has no tokens", field)
        if len(ids) > self._prompts.max_model_len:
            raise context_error(self._prompts.max_model_len, f"{shown} has {len(ids)} tokens", field, len(ids))


def _batches(texts: Sequence[Text], size: Callable[[Text], int]) -> Iterator[list[Text]]:
    """Yield the texts in order, as many together as a short job of text work may have. `size`: in characters.

    Other requests get their turn between two jobs.
    """
    batch: list[Text] = []
    chars = 0
    for text in texts:
        if batch and chars + size(text) > SHORT_CHARS:
            yield batch
            batch, chars = [], 0
        batch.append(text)
        chars += size(text)
    if batch:
        yield batch
