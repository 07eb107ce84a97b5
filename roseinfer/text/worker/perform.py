"""Text work on one job, in any process: prompts to token ids, ids to text."""

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.pooling import PairFormat
from roseinfer.core.request import context_error
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.pieces import PIECE_CHARS, cut_end, encode_long
from roseinfer.text.pooling_inputs import PairEncoder
from roseinfer.text.tokenizer import Tokenizer, encode_batch
from roseinfer.text.worker.messages import (
    Decoded,
    EncodeChat,
    EncodePairs,
    EncodeTexts,
    Job,
    Listed,
    ListTokens,
    Result,
    TextIds,
)

# Extra tokens that are encoded when only a prompt's end is kept, since the first ones may differ.
SPARE_TOKENS = 64
# Beyond the context a prompt is encoded no further than this, as a share of the context.
BEYOND_CONTEXT_SHARE = 2
LISTED_AT_ONCE_TOKENS = 2**16
MAX_LISTED_STRINGS = 2**18
# A text with fewer characters per token of context than this is tokenised, so that its error has the true length.
MAX_PLAUSIBLE_CHARS_PER_TOKEN = 16


class TextPerformer:
    """Text work with one tokenizer and its chat template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pair_encoders: dict[PairFormat, PairEncoder] = {}

    def perform(self, job: Job) -> Result:
        """Return the result of a job. Raises `InvalidRequestError`, `TokenizerFailedError`, `AliasesNeededError`."""
        if isinstance(job, EncodeChat):
            return self._chat(job)
        if isinstance(job, EncodeTexts):
            return self._texts(job)
        if isinstance(job, EncodePairs):
            return self._pairs(job)
        if isinstance(job, ListTokens):
            return self._list(job)
        return Decoded(self._tokenizer.decode(job.ids, skip_special_tokens=False))

    def _texts(self, job: EncodeTexts) -> TextIds:
        if not job.with_text:
            return TextIds([ids.tobytes() for batch in _batches(job) for ids in self._batch(batch, job)], [])
        done = [self._text(prompt, job) for prompt in job.prompts]
        return TextIds([ids.tobytes() for ids, _ in done], [text for _, text in done])

    def _pairs(self, job: EncodePairs) -> TextIds:
        encoder = self.pair_encoder(job.form)
        found = []
        for i, (query, document) in enumerate(job.pairs, job.first):
            try:
                found.append(encoder.encode(query, document, job.instruction, job.limit))
            except InvalidRequestError as error:
                if error.param == "instruction":
                    raise
                raise InvalidRequestError(f"pair {i}: {error.message}", error.param, error.code) from error
        ids = [array("I", pair.ids).tobytes() for pair in found]
        return TextIds(ids, [], [pair.second_text_from for pair in found])

    def pair_encoder(self, form: PairFormat) -> PairEncoder:
        encoder = self._pair_encoders.get(form)
        if encoder is None:
            literal = None if self._template is None else self._template.literal
            encoder = self._pair_encoders[form] = PairEncoder(self._tokenizer, form, literal)
        return encoder

    def _batch(self, prompts: list[str | list[int]], job: EncodeTexts) -> "list[array[int]]":
        """Return the token ids of prompts, which are short texts if there are several."""
        if len(prompts) == 1:
            return [self._text(prompts[0], job)[0]]
        backend, special = self._tokenizer.backend, job.add_special_tokens
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        all_ids = [array("I", encoded.ids) for encoded in encode_batch(backend, texts, special)]
        if job.keep_first is None:
            return all_ids
        return [cut_end(backend, ids, special, job.keep_first) for ids in all_ids]

    def _text(self, prompt: str | list[int], job: EncodeTexts) -> "tuple[array[int], str]":
        """Return the token ids and their text."""
        if not isinstance(prompt, str):
            ids = array("I", prompt if job.keep_last is None else prompt[-job.keep_last :])
            return ids, self._tokenizer.decode(ids) if job.with_text else ""
        ids = self._encode(self._tokenizer.backend, prompt, job, "prompt")
        was_cut = len(ids) == job.keep_last and job.with_text
        return ids, self._tokenizer.decode(ids) if was_cut else prompt

    def _chat(self, job: EncodeChat) -> TextIds:
        template = self._template
        assert template is not None, "checked before"
        backend, text = self._rendered(template, job)
        ids = self._encode(backend, text, job, "messages")
        opening = template.generation_prompt_len(ids, job.kwargs) if job.add_generation_prompt else 0
        return TextIds([ids.tobytes()], [], generation_prompt_len=opening)

    def _rendered(self, template: ChatTemplate, job: EncodeChat) -> tuple[tokenizers.Tokenizer, str]:
        options = (job.add_generation_prompt, job.continue_final_message, job.kwargs)
        try:
            return template.rendered(job.messages, *options)
        except InvalidRequestError:
            repaired = with_object_arguments(job.messages)
            if repaired is None:
                raise
            return template.rendered(repaired, *options)

    def _encode(
        self, backend: tokenizers.Tokenizer, text: str, job: EncodeTexts | EncodeChat, param: str
    ) -> "array[int]":
        max_tokens = None
        if isinstance(job, EncodeTexts) and job.keep_first is not None:
            ids = encode_long(backend, text, job.add_special_tokens, None, job.keep_first)
            return cut_end(backend, ids, job.add_special_tokens, job.keep_first)
        if job.keep_last is not None:
            text = text[-self._tokenizer.max_token_bytes * (job.keep_last + SPARE_TOKENS) :]
        elif job.context is not None and len(text) > PIECE_CHARS:  # else its true length is soon known
            check_length(text, job.context, self._tokenizer.max_token_bytes, param)
            max_tokens = BEYOND_CONTEXT_SHARE * job.context
        ids = encode_long(backend, text, job.add_special_tokens, job.keep_last, max_tokens)
        if max_tokens is not None and len(ids) > max_tokens:
            assert job.context is not None
            raise context_error(job.context, f"the prompt has more than {len(ids)} tokens", param, len(ids))
        return ids

    def _list(self, job: ListTokens) -> Listed:
        prompt, param = job.prompt, "prompt"
        if isinstance(prompt, EncodeChat):
            assert self._template is not None, "checked before"
            (backend, text), param = self._rendered(self._template, prompt), "messages"
            check_length(text, job.context, self._tokenizer.max_token_bytes, param)
        else:
            backend, text = self._tokenizer.backend, str(prompt.prompts[0])
        max_tokens = MAX_LISTED_STRINGS if job.with_strings else None
        ids = encode_long(backend, text, prompt.add_special_tokens, None, max_tokens)
        if max_tokens is not None and len(ids) > max_tokens:
            message = f"the {param} has more than {max_tokens} tokens, too many to list their texts"
            raise InvalidRequestError(message, "return_token_strs")
        names: dict[int, bytes] = {}
        strings = b"[%b]" % b",".join([self._named(id, names) for id in ids]) if job.with_strings else None
        return Listed(len(ids), _as_json(ids), strings)

    def _named(self, id: int, names: dict[int, bytes]) -> bytes:
        known = names.get(id)
        if known is None:
            known = names[id] = json.dumps(self._tokenizer.token_str(id), ensure_ascii=False).encode()
        return known


def _batches(job: EncodeTexts) -> Iterator[list[str | list[int]]]:
    """Yield the prompts in order, short texts together."""
    batch: list[str | list[int]] = []
    chars = 0
    for prompt in job.prompts:
        alone = not isinstance(prompt, str) or len(prompt) > PIECE_CHARS or job.keep_last is not None
        if batch and (alone or chars + len(prompt) > PIECE_CHARS):
            yield batch
            batch, chars = [], 0
        if alone:
            yield [prompt]
        else:
            batch.append(prompt)
            chars += len(prompt)
    if batch:
        yield batch


def check_length(text: str, context: int, max_token_bytes: int, param: str, shown: str = "the prompt") -> None:
    """Raise `RequestTooLongError` for a text that no tokenisation fits into the context, before it costs one.

    `shown`: name of the text in the error.
    """
    if len(text) <= MAX_PLAUSIBLE_CHARS_PER_TOKEN * context:
        return
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    if size > context * max_token_bytes:
        but = f"{shown} has {len(text)} characters, more than so many tokens can hold"
        raise context_error(context, but, param, -(-size // max_token_bytes))


def _as_json(ids: "array[int]") -> bytes:
    # In parts, as Python's integers take ten times as much memory.
    parts = [ids[start : start + LISTED_AT_ONCE_TOKENS] for start in range(0, len(ids), LISTED_AT_ONCE_TOKENS)]
    return b"[%b]" % b",".join([",".join(map(str, part)).encode() for part in parts])


def with_object_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return messages with `{}` for tool call arguments that are not objects, which some templates reject.

    Return None if there are no such arguments.
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
