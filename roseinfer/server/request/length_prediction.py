"""How long outputs will be: a trained predictor says it before the engine is asked, and is judged when they end."""

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


class Predicts(Protocol):
    """Used by several threads at once."""

    def predict(self, token_ids: Sequence[int], /) -> int:
        """Output tokens expected of a prompt, at least 1."""
        ...


class LengthObserver(Protocol):
    def took(self, seconds: float) -> None:
        """A prediction has been made."""
        ...

    def was_off(self, ratio: float) -> None:
        """Predicted over true output length, of a sample that ended by itself."""
        ...


def read_predictor(path: str) -> "LengthPredictor":
    """Raises `ConfigError` if the file holds no predictor."""
    from roseinfer.predictor.model import LengthPredictor  # needs NumPy, which the server does without

    try:
        return LengthPredictor.load(path)
    except ConfigError as error:
        raise ConfigError(f"length_predictor: {error}") from error


def check_vocabulary(path: str, learnt: "PredictorSettings", tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` for a predictor whose token ids are not the model's. Older files do not say."""
    from roseinfer.predictor.vocabulary import fingerprint

    if learnt.vocabulary not in ("", fingerprint(tokenizer.backend.get_vocab(with_added_tokens=True))):
        of = f"the tokenizer of {learnt.tokenizer!r}, which is not this model's"
        raise ConfigError(f"length_predictor: {path} was trained with {of}")


def length_prediction(
    path: str | None, tokenizer: Tokenizer, offload: Offload, observer: Callable[[], LengthObserver]
) -> "LengthPrediction | None":
    """With the predictor that the option `length_predictor` names, if it does. Raises `ConfigError`."""
    if path is None:
        return None
    predictor = read_predictor(path)
    learnt = predictor.settings
    check_vocabulary(path, learnt, tokenizer)
    if not learnt.vocabulary:
        log.warning("%s does not say whose token ids it knows; it was trained for %r", path, learnt.tokenizer)
    return LengthPrediction(predictor, offload, observer())


class LengthPrediction:
    """Fills the `predicted_len` of prompts, and tells how good that was."""

    def __init__(self, predictor: Predicts, offload: Offload, observer: LengthObserver) -> None:
        self._predictor = predictor
        self._offload = offload
        self._complained = False
        self._observer = observer

    async def fill(self, job: Job) -> Job:
        """With predictions for the prompts, one each, if objectives depend on them and the client gave none."""
        if not job.has_objectives or job.meta.predicted_len is not None:
            return job
        timed = await self._offload.run(self._predict, [prompt.ids for prompt in job.prompts])
        for _, seconds in timed:
            self._observer.took(seconds)
        prompts = [_with_length(prompt, length) for prompt, (length, _) in zip(job.prompts, timed, strict=True)]
        return replace(job, prompts=tuple(prompts), lengths_predicted=True)

    def ended(self, job: Job, progress: JobProgress) -> None:
        """Compares what was said with what came. Outputs that were cut could have been of any length."""
        if not job.lengths_predicted:
            return
        for prompt, run in zip(job.prompts, progress.runs, strict=False):  # fewer runs if the engine refused one
            for sample in run.samples:
                predicted = prompt.meta.predicted_len
                if predicted and sample.tokens and sample.finish_reason is FinishReason.STOP:
                    self._observer.was_off(predicted / sample.tokens)

    def _predict(self, prompts: Iterable[list[int]]) -> list[tuple[int | None, float]]:
        """(output tokens or None, seconds it took) of each; in a thread."""
        found = []
        for ids in prompts:
            start_s = perf_counter()
            length = self._predict_one(ids)
            found.append((length, perf_counter() - start_s))
        return found

    def _predict_one(self, ids: list[int]) -> int | None:
        """A request is worth more than what is guessed about it."""
        try:
            return self._predictor.predict(ids)
        except Exception:
            if not self._complained:
                self._complained = True
                log.exception("the length predictor failed; requests go on without, and this is said only once")
            return None


def _with_length(prompt: Prompt, length: int | None) -> Prompt:
    most = prompt.params.max_tokens
    if not length or not most:
        return prompt
    return replace(prompt, meta=replace(prompt.meta, predicted_len=min(length, most)))
