"""Prediction of output lengths before a request reaches the engine, and its accuracy afterwards."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt
from roseinfer.server.request.job import Job, JobProgress
from roseinfer.server.text_work.offload import Offload
from roseinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from roseinfer.predictor.model import LengthPredictor, PredictorSettings

log = logging.getLogger(__name__)


class OutputLengthPredictor(Protocol):
    """Trained predictor. Called by several threads at once."""

    def predict(self, token_ids: Sequence[int], /) -> int:
        """Return the expected number of output tokens, at least 1."""
        ...


class LengthObserver(Protocol):
    def took(self, seconds: float) -> None:
        """Note the duration of a prediction."""
        ...

    def was_off(self, ratio: float) -> None:
        """Note predicted / actual output length of a sample that stopped by itself."""
        ...


def read_predictor(path: str) -> "LengthPredictor":
    """Load a predictor. Raises `ConfigError` if the file is none."""
    from roseinfer.predictor.model import LengthPredictor  # imports NumPy, which the server otherwise does not need

    try:
        return LengthPredictor.load(path)
    except ConfigError as error:
        raise ConfigError(f"length_predictor: {error}") from error


def check_vocabulary(path: str, learnt: "PredictorSettings", tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` for a predictor trained on another vocabulary. Older files do not name theirs."""
    from roseinfer.predictor.vocabulary import fingerprint

    if learnt.vocabulary not in ("", fingerprint(tokenizer.backend.get_vocab(with_added_tokens=True))):
        of = f"the tokenizer of {learnt.tokenizer!r}, which is not this model's"
        raise ConfigError(f"length_predictor: {path} was trained with {of}")


def length_prediction(
    path: str | None, tokenizer: Tokenizer, offload: Offload, observer: Callable[[], LengthObserver]
) -> "LengthPrediction | None":
    """Return the prediction that the option `length_predictor` configures, if any. Raises `ConfigError`."""
    if path is None:
        return None
    predictor = read_predictor(path)
    learnt = predictor.settings
    check_vocabulary(path, learnt, tokenizer)
    if not learnt.vocabulary:
        log.warning("%s names no vocabulary; it was trained for %r", path, learnt.tokenizer)
    return LengthPrediction(predictor, offload, observer())


class LengthPrediction:
    """Set `predicted_len` of prompts, and report its accuracy."""

    def __init__(self, predictor: OutputLengthPredictor, offload: Offload, observer: LengthObserver) -> None:
        self._predictor = predictor
        self._offload = offload
        self._logged_failure = False
        self._observer = observer

    async def fill(self, job: Job) -> Job:
        """Return the job with a prediction per prompt if it has objectives and the client gave no length."""
        if not job.has_objectives or job.meta.predicted_len is not None:
            return job
        timed = await self._offload.run(self._predict, [prompt.ids for prompt in job.prompts])
        for _, seconds in timed:
            self._observer.took(seconds)
        prompts = [_with_length(prompt, length) for prompt, (length, _) in zip(job.prompts, timed, strict=True)]
        return replace(job, prompts=tuple(prompts), lengths_predicted=True)

    def ended(self, job: Job, progress: JobProgress) -> None:
        """Report the accuracy for outputs that stopped by themselves."""
        if not job.lengths_predicted:
            return
        for prompt, run in zip(job.prompts, progress.runs, strict=False):  # fewer runs if the engine rejected one
            for sample in run.samples:
                predicted = prompt.meta.predicted_len
                if predicted and sample.tokens and sample.finish_reason is FinishReason.STOP:
                    self._observer.was_off(predicted / sample.tokens)

    def _predict(self, prompts: Iterable[list[int]]) -> list[tuple[int | None, float]]:
        """Return (output tokens or None, seconds) of each prompt. Runs in a thread."""
        found = []
        for ids in prompts:
            start_s = perf_counter()
            length = self._predict_one(ids)
            found.append((length, perf_counter() - start_s))
        return found

    def _predict_one(self, ids: list[int]) -> int | None:
        """Return a prediction; None if the predictor fails, which must not fail the request."""
        try:
            return self._predictor.predict(ids)
        except Exception:
            if not self._logged_failure:
                self._logged_failure = True
                log.exception("length predictor failed; requests run without prediction (logged once)")
            return None


def _with_length(prompt: Prompt, length: int | None) -> Prompt:
    most = prompt.params.max_tokens
    if not length or not most:
        return prompt
    return replace(prompt, meta=replace(prompt.meta, predicted_len=min(length, most)))
