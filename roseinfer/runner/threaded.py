"""Runner on a separate thread, so that on a CPU the engine plans while a step computes."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from roseinfer.core.errors import EngineClosedError
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import PassThrough, Runner


class ThreadedHandle:
    """Step on its way through the worker. `done` is set with either a result or an error."""

    __slots__ = ("done", "error", "inner", "masks", "plan", "result")

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.inner: Any = None
        self.masks: TokenMasks | None = None
        self.result: StepResult | None = None
        self.error: Exception | None = None
        self.done = threading.Event()


_Job = tuple[Callable[[ThreadedHandle], None], ThreadedHandle]


class ThreadedRunner(PassThrough):
    """Runs another runner's calls in order on one worker thread; torch releases the GIL while it computes.

    `submit` and `sample` return at once. `collect` raises their exceptions, for that step and for every later one,
    whose inputs are spoiled. The worker also collects, right after sampling, so that one thread makes all calls of the
    inner runner.
    """

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="roseinfer-runner", daemon=True)
        self._failure: Exception | None = None  # touched by the worker only
        self._closed = False
        self._worker.start()

    def submit(self, plan: StepPlan) -> ThreadedHandle:
        """Queue a step's forward pass."""
        handle = ThreadedHandle(plan)
        self._put(self._submit, handle)
        return handle

    def sample(self, handle: ThreadedHandle, masks: TokenMasks | None = None) -> None:
        """Queue the sampling of a submitted step."""
        handle.masks = masks
        self._put(self._sample, handle)

    def collect(self, handle: ThreadedHandle) -> StepResult:
        """Wait for a sampled step. Raise what its submit or sample raised."""
        if self._closed and not handle.done.is_set():
            raise EngineClosedError("the runner was closed before the step was sampled")
        handle.done.wait()
        if handle.error is not None:
            raise handle.error
        assert handle.result is not None
        return handle.result

    def close(self) -> None:
        """Finish queued work, end the thread, close the inner runner.

        Repeated calls are allowed. The garbage collector may call it on the worker thread itself.
        """
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        if threading.current_thread() is not self._worker:
            self._worker.join()
        self.inner.close()

    def _put(self, job: Callable[[ThreadedHandle], None], handle: ThreadedHandle) -> None:
        assert not self._closed, "the runner is closed"
        self._jobs.put((job, handle))

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, handle = item
            if self._failure is None:
                self._run(job, handle)
            if self._failure is not None and not handle.done.is_set():
                handle.error = self._failure
                handle.done.set()

    def _run(self, job: Callable[[ThreadedHandle], None], handle: ThreadedHandle) -> None:
        try:
            job(handle)
        except Exception as error:
            self._failure = error

    def _submit(self, handle: ThreadedHandle) -> None:
        handle.inner = self.inner.submit(handle.plan)

    def _sample(self, handle: ThreadedHandle) -> None:
        self.inner.sample(handle.inner, handle.masks)
        handle.result = self.inner.collect(handle.inner)
        handle.done.set()
