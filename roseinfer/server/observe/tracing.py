"""Interface of traces of requests, which an integration implements."""

from typing import Protocol

from roseinfer.server.observe.records import RequestRecords
from roseinfer.server.request.generation import Observer
from roseinfer.server.request.inference import AnswerFormat, Inference
from roseinfer.server.request.models import ServedModels


class Tracing(Protocol):
    """Traces of one API process."""

    def observer(self, inner: Observer, records: RequestRecords) -> Observer:
        """Return an observer that passes all events to `inner`, which adds ended requests to `records`."""
        ...

    def inference(self, models: ServedModels, answer_format: AnswerFormat) -> Inference:
        """Return an inference route whose calls are traced."""
        ...

    def close(self) -> None:
        """Send what remains. Call it in a thread, because it blocks."""
        ...
