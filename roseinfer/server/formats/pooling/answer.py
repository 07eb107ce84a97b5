"""Answers of embeddings, scores and reranking, as JSON."""

from array import array
from base64 import b64encode
from collections.abc import Callable
from math import sqrt
from operator import mul
from typing import Any

import orjson

from roseinfer.core.pooling import floats
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.http.errors import OPENAI
from roseinfer.server.request.inference import StandardRun
from roseinfer.server.request.job import Job, Usage
from roseinfer.server.request.receivers import Encoder
from roseinfer.text.tokenizer import Tokenizer


class PoolingBody:
    """Builder of an answer from the results of a job's prompts. See `request.receivers.Body`."""

    takes_long = True

    def __init__(self, job: Job) -> None:
        self._job = job
        self._vectors = [b""] * len(job.prompts)

    def add(self, prompt: int, chunk: SequenceChunk) -> None:
        if chunk.vector is not None:
            self._vectors[prompt] = chunk.vector

    def body(self, usage: Usage) -> dict[str, Any] | bytes:
        raise NotImplementedError


class PoolingFormat:
    """Common part of the formats of prompt-only requests. See `request.inference.AnswerFormat`."""

    dialect = OPENAI
    make_run = StandardRun
    answer: type[PoolingBody]

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> Encoder:
        raise AssertionError("answers to prompt-only requests are not streamed")

    def whole(self, job: Job, tokenizer: Tokenizer) -> PoolingBody:
        return self.answer(job)


class EmbeddingBody(PoolingBody):
    """Builder of the answer of /v1/embeddings."""

    def body(self, usage: Usage) -> bytes:
        # One call for each embedding, so that the event loop gets its turn between them.
        encode = as_base64 if self._job.about["base64"] else as_numbers
        entries = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (i, encode(vector))
            for i, vector in enumerate(self._vectors)
        ]
        return with_data(self._job, entries, usage)


class PairBody(PoolingBody):
    """Builder of an answer with a score for each pair."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        # Of inputs whose embeddings have the cosines that are the scores; None: each result is a score.
        self._pairs: list[tuple[int, int]] | None = job.about.get("pairs")
        self.takes_long = self._pairs is not None

    def scores(self) -> list[float]:
        found = [floats(vector) for vector in self._vectors]
        if self._pairs is None:
            return [vector[0] for vector in found]
        norms = [sqrt(_product(vector, vector)) for vector in found]
        return [_product(found[i], found[j]) / (norms[i] * norms[j] or 1.0) for i, j in self._pairs]


class ScoreBody(PairBody):
    """Builder of the answer of /score."""

    def body(self, usage: Usage) -> bytes:
        scores = enumerate(self.scores())
        entries = [orjson.dumps({"index": i, "object": "score", "score": score}) for i, score in scores]
        return with_data(self._job, entries, usage)


class RerankBody(PairBody):
    """Builder of the answer of /rerank: documents by falling score, equal ones in the request's order."""

    def body(self, usage: Usage) -> dict[str, Any]:
        job, scores = self._job, self.scores()
        best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        documents: list[str] | None = job.about["documents"]
        results = []
        for i in best[: job.about["top_n"] or None]:
            document = {} if documents is None else {"document": {"text": documents[i]}}
            results.append({"index": i, **document, "relevance_score": scores[i]})
        answer = {"id": job.id, "model": job.model, "usage": prompt_usage(usage), "results": results}
        return answer | {"warnings": list(job.warnings)} if job.warnings else answer


def _product(a: "array[float]", b: "array[float]") -> float:
    return sum(map(mul, a, b))


def as_base64(vector: bytes) -> bytes:
    return b'"%b"' % b64encode(vector)


def as_numbers(vector: bytes) -> bytes:
    return orjson.dumps(floats(vector).tolist())


def with_data(job: Job, entries: list[bytes], usage: Usage) -> bytes:
    """Return an answer of type `list`. `entries`: its data, as JSON."""
    rest: dict[str, Any] = {
        "id": job.id,
        "created": job.created,
        "model": job.model,
        "usage": prompt_usage(usage),
    }
    if job.warnings:
        rest["warnings"] = list(job.warnings)
    return b'{"object":"list","data":[%b],%b' % (b",".join(entries), orjson.dumps(rest)[1:])


def prompt_usage(usage: Usage) -> dict[str, object]:
    """Return the usage without outputs."""
    fields = usage.as_dict()
    del fields["completion_tokens"]
    return fields
