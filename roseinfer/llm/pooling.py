"""Embeddings and scores in this process: the part of `LLM` for models that return vectors."""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

from roseinfer.core.errors import InvalidRequestError, RequestFailedError
from roseinfer.core.pooling import PoolingInfo, PoolingParams, PoolingTask, floats
from roseinfer.core.request import RequestMeta, kept_prompt_tokens
from roseinfer.engine.api import GenerateRequest
from roseinfer.engine.local import LocalEngine, naming_prompt
from roseinfer.engine.pooling import PooledOutput, pooled, pooling_prompt
from roseinfer.llm.outputs import EmbeddingOutput, ScoreOutput
from roseinfer.llm.progress import MakeBar, progress_bar
from roseinfer.llm.prompts import PromptInput, PromptType, as_batch, read_prompt
from roseinfer.text.pieces import cut_end
from roseinfer.text.pooling_inputs import PairEncoder


class VectorCalls:
    """Calls of one `LLM` that return vectors. `numbers`: ids of its requests."""

    def __init__(self, engine: LocalEngine, numbers: Iterator[int]) -> None:
        self._engine = engine
        self._numbers = numbers

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        dimensions: int | None,
        prompt_name: str | None,
        truncate: int | None,
        use_tqdm: bool | MakeBar,
    ) -> list[EmbeddingOutput]:
        """Return embeddings as `LLM.embed` does."""
        info = self._info(PoolingTask.EMBED)
        before = prompt_before(info, prompt_name)
        limit = self._limit(truncate)

        def read(given: Any) -> PromptInput:
            prompt = read_prompt(given)
            if prompt.ids is not None:
                return prompt if limit is None else PromptInput(prompt.text, prompt.ids[:limit], prompt.cache_salt)
            text = before + (prompt.text or "")
            ids = self._engine.tokenizer.encode(text)
            if limit is not None:
                ids = cut_end(self._engine.tokenizer.backend, array("I", ids), True, limit).tolist()
            return PromptInput(text, ids, prompt.cache_salt)

        params = PoolingParams(dimensions=dimensions)
        inputs, requests = self._requests(as_batch(prompts), lambda given: (read(given), params))
        return [
            EmbeddingOutput(
                request_id=request.request_id,
                embedding=floats(found.vector).tolist(),
                prompt=given.text,
                prompt_token_ids=request.prompt.ids,
                num_cached_tokens=found.cached_tokens,
            )
            for given, request, found in zip(inputs, requests, self._run(requests, use_tqdm), strict=True)
        ]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str | None,
        truncate: int | None,
        use_tqdm: bool | MakeBar,
    ) -> list[ScoreOutput]:
        """Return scores as `LLM.score` does."""
        pairs = as_pairs(query, documents)
        info = self._info(None)
        if info.task is PoolingTask.EMBED:
            if instruction is not None:
                raise InvalidRequestError("instruction is not supported: the model returns embeddings", "instruction")
            return self._similarities(pairs, truncate, use_tqdm)
        limit = self._limit(truncate)

        def read(pair: tuple[str, str]) -> tuple[PromptInput, PoolingParams]:
            encoded = self._pairs.encode(*pair, instruction, limit)
            return PromptInput(None, encoded.ids), PoolingParams(second_text_from=encoded.second_text_from)

        _, requests = self._requests(pairs, read)
        return [
            ScoreOutput(request.request_id, floats(found.vector)[0], request.prompt.ids, found.cached_tokens)
            for request, found in zip(requests, self._run(requests, use_tqdm), strict=True)
        ]

    def _similarities(
        self, pairs: list[tuple[str, str]], truncate: int | None, use_tqdm: bool | MakeBar
    ) -> list[ScoreOutput]:
        """Return the cosine of the embeddings of each pair; equal texts are embedded once."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        found = dict(zip(texts, self.embed(texts, None, None, truncate, use_tqdm), strict=True))
        scores = []
        for query, document in pairs:
            first, second = found[query], found[document]
            ids = [*first.prompt_token_ids, *second.prompt_token_ids]
            cached = first.num_cached_tokens + second.num_cached_tokens
            score = cosine(first.embedding, second.embedding)
            scores.append(ScoreOutput(str(next(self._numbers)), score, ids, cached))
        return scores

    # --- internals ------------------------------------------------------------------------------------------------
    @cached_property
    def _pairs(self) -> PairEncoder:
        form = self._info(PoolingTask.SCORE).pairs
        assert form is not None, "a model that scores has a form of pairs"
        return PairEncoder(self._engine.tokenizer, form)

    def _info(self, task: PoolingTask | None) -> PoolingInfo:
        """Return the model's properties. Raise `InvalidRequestError` if it has another task."""
        info = self._engine.info.facts.pooling
        if info is None:
            raise InvalidRequestError("the model generates text; create the LLM with runner='pooling'", "model")
        if task is not None and info.task is not task:
            raise InvalidRequestError(f"the task of this model is {info.task}, not {task}", "model")
        return info

    def _limit(self, truncate: int | None) -> int | None:
        """Return the most tokens of an input; None = longer inputs are errors."""
        if truncate is not None and (type(truncate) is not int or truncate < -1 or truncate == 0):
            message = f"truncate_prompt_tokens must be -1 or a positive integer, got {truncate!r}"
            raise InvalidRequestError(message, "truncate_prompt_tokens")
        return kept_prompt_tokens(truncate, 0, self._engine.info.facts.max_model_len)

    def _requests(
        self, given: Sequence[Any], read: Callable[[Any], tuple[PromptInput, PoolingParams]]
    ) -> tuple[list[PromptInput], list[GenerateRequest]]:
        inputs, requests = [], []
        for number, each in enumerate(given):
            with naming_prompt(number, len(given)):
                prompt, params = read(each)
                assert prompt.ids is not None
                meta = RequestMeta(cache_salt=prompt.cache_salt)
                made = pooling_prompt(prompt.ids, meta, params)
                inputs.append(prompt)
                requests.append(GenerateRequest(request_id=str(next(self._numbers)), prompt=made))
        return inputs, requests

    def _run(self, requests: list[GenerateRequest], use_tqdm: bool | MakeBar) -> list[PooledOutput]:
        """Run requests to their ends. Raise `RequestFailedError` naming the first that failed."""
        found: dict[int, PooledOutput | RequestFailedError] = {}
        with progress_bar(use_tqdm, len(requests)) as ended, closing(self._engine.run(requests)) as steps:
            for chunks in steps:
                for number, chunk in chunks:
                    ended(len(requests[number].prompt.ids), 0)
                    try:
                        found[number] = pooled(requests[number].prompt, chunk)
                    except RequestFailedError as error:
                        found[number] = error
        results = []
        for number in range(len(requests)):
            result = found[number]
            if isinstance(result, RequestFailedError):
                raise RequestFailedError(f"prompts[{number}]: {result}") from result
            results.append(result)
        return results


def prompt_before(info: PoolingInfo, name: str | None) -> str:
    """Return the text that the model's folder puts before an input. Raise `InvalidRequestError` for other names."""
    if name is None:
        return info.prompts[info.default_prompt] if info.default_prompt is not None else ""
    if name not in info.prompts:
        known = ", ".join(info.prompts) or "none"
        raise InvalidRequestError(f"unknown prompt_name {name!r}; the model's prompts: {known}", "prompt_name")
    return info.prompts[name]


def as_pairs(query: Any, documents: Any) -> list[tuple[str, str]]:
    """Return pairs of one query and each document, or of the i-th query and the i-th document.

    Raise `InvalidRequestError` for anything but texts, and for lists of different lengths.
    """
    queries, texts = _texts(query, "query"), _texts(documents, "documents")
    if len(queries) == 1:
        queries = queries * len(texts)
    if len(queries) != len(texts):
        message = f"there are {len(queries)} queries and {len(texts)} documents (expected one query, or as many)"
        raise InvalidRequestError(message, "query")
    return list(zip(queries, texts, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{name} must be text or a list of texts", name)
    return list(texts)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = math.sqrt(sum(x * x for x in first) * sum(y * y for y in second))
    return sum(x * y for x, y in zip(first, second, strict=True)) / lengths if lengths else 0.0
