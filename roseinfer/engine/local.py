"""Engine in this process, without a server: requests in, chunks of their output after every step."""

import contextlib
import os
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from roseinfer.config.hub import load_tokenizer, model_folder
from roseinfer.core.adapters import Adapter, AdapterRead
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    TooManyInflightError,
)
from roseinfer.core.observer import StepObserver
from roseinfer.core.outputs import FinishReason, SequenceOutput
from roseinfer.core.request import sequence_id
from roseinfer.engine.adapters import NO_ADAPTERS
from roseinfer.engine.api import GenerateRequest, SequenceChunk
from roseinfer.engine.core import IDLE_TURN_WAIT_S, EngineCore
from roseinfer.engine.live import prepare
from roseinfer.engine.messages import Add
from roseinfer.engine.output import OutputDelivery, SequenceText, sequence_text

NumberedChunks = list[tuple[int, SequenceChunk]]


class LocalEngine:
    """Engine in this process. Not usable in a fork of it. Not thread safe; one call at a time.

    Closed at the latest when it is garbage collected or the interpreter exits. `observer` is called for every step.

    Raise `ConfigError` for contradictory options, and `ModelNotFoundError` or `UnsupportedModelError` for a model that
    cannot be loaded.
    """

    def __init__(self, config: EngineConfig, observer: StepObserver | None = None) -> None:
        from roseinfer.engine.build import build_engine

        self._owner = os.getpid()
        self.tokenizer = load_tokenizer(config.model)
        self.core, self.info = build_engine(config, model_folder(config.model), observer)
        self._max_inflight = config.scheduler.max_inflight_requests
        self._clock: Clock = MonotonicClock()  # same time scale as the engine's clock
        self._closed = False
        self._broken = False  # a step was interrupted: its resources are never released
        self._close_core = weakref.finalize(self, _close_in_owner, self.core, self._owner)

    def run(self, requests: Sequence[GenerateRequest]) -> Generator[NumberedChunks, None, None]:
        """Yield after every step a list of (number of the request, its chunk) until all requests have ended.

        Closing the generator early aborts the requests. Raise `InvalidRequestError` if a request is invalid, before any
        of them runs; a grammar that does not compile raises it later.
        """
        batch = self._add(requests)
        try:
            while batch.open:
                outputs = self._turn()
                for _, error in self.core.take_invalid():
                    raise error
                yield batch.deliver(outputs, self._clock.now())
            self._drain()
        finally:
            self._abort(batch)

    def adapters(self) -> Mapping[str, Adapter]:
        """Return the LoRA adapters by name. The mapping changes in place."""
        return {} if self.core.adapters is None else self.core.adapters.names.adapters

    def put_adapter(self, name: str, path: str) -> Adapter:
        """Load a LoRA adapter and give it a name. Raise `InvalidRequestError`, see `engine.api.Engine.put_adapter`."""
        self._check_free()
        if self.core.adapters is None:
            raise InvalidRequestError(NO_ADAPTERS)
        reads: list[AdapterRead] = []
        self.core.adapters.read_for(name, path, reads.append)
        while not reads:
            self._turn()
        adapter = reads[0].adapter
        if adapter is None:
            raise InvalidRequestError(reads[0].error or "unknown error", "path", "adapter_not_loaded")
        self.core.adapters.names.set(name, adapter)
        return adapter

    def drop_adapter(self, name: str) -> Adapter:
        """Drop the name of an adapter. Raise `InvalidRequestError` for an unknown name."""
        if self.core.adapters is None:
            raise InvalidRequestError(NO_ADAPTERS)
        adapter = self.core.adapters.names.find(name)
        self.core.adapters.names.set(name, None)
        return adapter

    def close(self) -> None:
        self._closed = True
        self._close_core()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- internals ------------------------------------------------------------------------------------------------
    def _check_usable(self) -> None:
        """Raise an error in a fork of the creating process, which lacks the engine's threads, devices and child
        processes, and after `close`.
        """
        if os.getpid() != self._owner:
            raise EngineDeadError("this LLM belongs to the parent process; create one after the fork")
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _check_free(self) -> None:
        """Raise an error if the engine cannot begin a call."""
        self._check_usable()
        if self._broken:
            raise EngineDeadError(
                "an earlier call was interrupted during a step, so this LLM is unusable; create a new one"
            )
        if self.core.busy:
            raise InvalidRequestError("another call of this LLM is not finished; exhaust or close its stream first")

    def _add(self, requests: Sequence[GenerateRequest]) -> "_Batch":
        """Queue all requests, or none if one is invalid."""
        self._check_free()
        if self._max_inflight is not None and len(requests) > self._max_inflight:
            raise TooManyInflightError(
                f"{len(requests)} prompts at once exceed max_inflight_requests {self._max_inflight}"
            )
        batch = _Batch(self.core)
        try:
            for number, request in enumerate(requests):
                with naming_prompt(number, len(requests)):
                    prompt = prepare(request.prompt, self.tokenizer, self.info.facts.max_model_len)
                    self.core.add(Add(request.request_id, prompt, request.n))
                    texts = [
                        sequence_text(replace(request, prompt=prompt), i, self.tokenizer) for i in range(request.n)
                    ]
                    batch.add(number, request.request_id, texts)
        except BaseException:  # also an interrupt: requests left in the engine would block every later call
            self._abort(batch)
            raise
        return batch

    def _turn(self) -> list[SequenceOutput]:
        """Run one step of the engine. Wait a little after an idle turn, to avoid a busy loop."""
        self._check_usable()
        try:
            outputs = self.core.step()
        except BaseException:
            self._broken = True
            raise
        if self.core.idle_turn:
            time.sleep(IDLE_TURN_WAIT_S)
        return outputs

    def _abort(self, batch: "_Batch") -> None:
        if os.getpid() == self._owner:
            self.core.abort(batch.sequences)
            self._drain()

    def _drain(self) -> None:
        """Step until the engine is empty: aborted requests end, and steps in flight complete. Drop the output."""
        while self.core.busy and not self._broken and not self._closed:
            self._turn()
            self.core.take_invalid()


class _Batch(OutputDelivery["_Numbered"]):
    """Open sequences of one call. A sample that fails ends alone."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._core = core
        self._chunks: NumberedChunks = []

    @property
    def open(self) -> bool:
        return bool(self._sequences)

    @property
    def sequences(self) -> list[str]:
        return list(self._sequences)

    def add(self, number: int, request_id: str, texts: list[SequenceText]) -> None:
        request = _Numbered(number, self._chunks)
        for text in texts:
            self._sequences[sequence_id(request_id, text.index)] = (request, text)

    def deliver(self, outputs: list[SequenceOutput], now_s: float) -> NumberedChunks:
        """Return the chunks of a step that ended at `now_s`."""
        self._deliver(outputs, now_s)
        chunks = self._chunks.copy()
        self._chunks.clear()
        return chunks

    def _fail_sample(
        self, request: "_Numbered", text: SequenceText, output: SequenceOutput, error: RequestFailedError
    ) -> None:
        text.ended = True
        self._end_sequence(output.request_id, request)
        if output.end is None:
            self._abort([output.request_id])
        request.sink.put(SequenceChunk(text.index, finish_reason=FinishReason.ERROR, stop_reason=str(error)))

    def _abort(self, sequences: list[str]) -> None:
        self._core.abort(sequences)


class _Numbered:
    """Request number `number` of a call, and the sink that collects its chunks with those of the others."""

    def __init__(self, number: int, chunks: NumberedChunks) -> None:
        self._number = number
        self._chunks = chunks

    @property
    def sink(self) -> "_Numbered":
        return self

    def put(self, chunk: SequenceChunk) -> None:
        self._chunks.append((self._number, chunk))


@contextlib.contextmanager
def naming_prompt(number: int, count: int) -> Iterator[None]:
    """Add the number of a prompt, one of `count`, to the message of an `InvalidRequestError`."""
    try:
        yield
    except InvalidRequestError as error:
        if count > 1:
            error.message = f"prompts[{number}]: {error.message}"
            error.args = (error.message,)
        raise


def _close_in_owner(core: EngineCore, owner: int) -> None:
    if os.getpid() == owner:
        core.close()
