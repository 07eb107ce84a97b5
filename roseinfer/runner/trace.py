"""Observation of a runner's steps: a span for each call, and traces of steps on the host and on the device."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from roseinfer.core.config.engine import ProfileConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.observer import StepObserver
from roseinfer.core.plan import StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import PassThrough, Runner

log = logging.getLogger(__name__)


class ObservedHandle(NamedTuple):
    plan: StepPlan
    inner: Any


class ObservedRunner(PassThrough):
    """Runner whose calls are spans. `ModelRunner.observe` reports the spans within its calls."""

    def __init__(self, inner: Runner, observer: StepObserver) -> None:
        super().__init__(inner)
        self._observer = observer

    def submit(self, plan: StepPlan) -> ObservedHandle:
        self._observer.step_begins(plan)
        with self._observer.span("submit"):
            return ObservedHandle(plan, self.inner.submit(plan))

    def sample(self, handle: ObservedHandle, masks: TokenMasks | None = None) -> None:
        with self._observer.span("sample"):
            self.inner.sample(handle.inner, masks)

    def collect(self, handle: ObservedHandle) -> StepResult:
        with self._observer.span("collect"):
            result = self.inner.collect(handle.inner)
        self._observer.step_ends(handle.plan)
        return result

    def close(self) -> None:
        self._observer.close()
        self.inner.close()


class TraceObserver:
    """Marks every step's phases with NVTX ranges (on CUDA), and records some steps with torch's profiler.

    Only steps with rows count, from 0. A trace begins at each step of `config.profile_start` and ends once
    `config.profile_steps` steps have been collected. It is written as DIR/trace-step-N.json in Chrome's format, during
    which the engine stands still. Raise `ConfigError` if the folder cannot be made.
    """

    def __init__(self, config: ProfileConfig, *, cuda: bool) -> None:
        assert config.profile is not None, "traces are off"
        self._folder = Path(config.profile)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile: cannot make {self._folder}: {error.strerror}") from error
        self._steps = config.profile_steps
        self._starts = list(config.starts)
        self._cuda = cuda
        self._begun = self._ended = 0
        self._first = 0
        self._profiler: profile | None = None
        with self._make_profiler():
            pass  # the first one takes seconds to set up

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        if self._cuda:
            torch.cuda.nvtx.range_push(phase)
        try:
            if self._profiler is None:
                yield
            else:
                with record_function(phase):
                    yield
        finally:
            if self._cuda:
                torch.cuda.nvtx.range_pop()

    def step_begins(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        if self._starts and self._begun == self._starts[0] and self._profiler is None:
            self._start()
        self._begun += 1

    def step_ends(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        self._ended += 1
        if self._profiler is not None and self._ended == self._first + self._steps:
            self._write()

    def close(self) -> None:
        """Write what exists of an unfinished trace."""
        if self._profiler is not None:
            self._write()
        elif self._starts:
            log.warning("no trace begins at step %d: the engine ends after %d", self._starts[0], self._begun)

    def _start(self) -> None:
        self._first = self._starts.pop(0)
        self._profiler = self._make_profiler()
        self._profiler.start()

    def _make_profiler(self) -> profile:
        return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])])

    def _write(self) -> None:
        assert self._profiler is not None
        if self._cuda:
            torch.cuda.synchronize()
        self._profiler.stop()
        path = self._folder / f"trace-step-{self._first}.json"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        if _is_whole(path):
            log.info("a trace of %d steps is in %s", self._ended - self._first, path)
        else:
            log.error("profile: a trace of %d steps could not be written to %s", self._ended - self._first, path)


def _is_whole(path: Path) -> bool:
    """True if the file ends as JSON does. The profiler raises no error if it cannot write one or all of it."""
    try:
        with path.open("rb") as file:
            file.seek(-2, os.SEEK_END)
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False
