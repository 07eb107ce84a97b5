"""The streams and events of a GPU, and its copies, on a CPU: bytes move as late as these allow, or sometimes sooner.

Steps themselves run at once, so what is written by them is there when an event is recorded behind them.
"""

import ctypes
import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from roseinfer.attention.host_store import HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.runner import assembly, cuda_host_copies
from roseinfer.runner.cuda_host_copies import CudaCopier

Copy = tuple[int, int, int]  # target, source, bytes


class LateCopies:
    """Stands in for `torch.cuda` and the driver in what `CudaCopier` asks of them.

    A copy happens when something behind it is waited for; with `rng` a random number of them happens before, too.
    `told`: what each stream has still to do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random | None = None) -> None:
        self.told: dict[int, deque[Copy]] = {}
        self.moved = 0
        self._rng = rng
        self._records = itertools.count(1)
        numbers = itertools.count(1)
        copies = self

        class Stream:
            def __init__(self, device: object = None) -> None:
                self.cuda_stream = next(numbers)
                self.behind = 0  # the newest record of the steps' stream that this one waits for
                copies.told[self.cuda_stream] = deque()
                copies.streams[self.cuda_stream] = self

            def wait_event(self, event: "Event") -> None:
                assert event.stream is copies.steps, "behind what steps were given"
                self.behind = event.number

            def synchronize(self) -> None:
                copies.catch_up(self.cuda_stream)

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timed, self.stream, self.number = enable_timing, None, 0

            def record(self, stream: Stream) -> None:
                self.stream, self.number = stream, next(copies._records)
                if stream is copies.steps:
                    copies.recorded = self.number

            def synchronize(self) -> None:
                self.stream.synchronize()

            def elapsed_time(self, other: "Event") -> float:
                assert self.timed and other.timed and other.stream is self.stream
                return 2.0

        self.streams: dict[int, Any] = {}
        self.recorded = 0  # the newest record of the steps' stream
        self.steps = Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.steps)
        monkeypatch.setattr(cuda_host_copies, "CopyDriver", lambda: self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have engines on a CPU copy like this."""
        monkeypatch.setattr(assembly, "make_copier", self.copier)

    def copier(self, store: KVStore, host: HostStore) -> CudaCopier:
        return CudaCopier(store, host)

    def copy(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """Signature of the driver's function."""
        assert self.streams[stream].behind == self.recorded > 0, "behind all that the step had been given by then"
        self.told[stream].extend(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        if self._rng is not None:
            for other, waiting in self.told.items():
                self._move(other, self._rng.randrange(len(waiting) + 1))

    def catch_up(self, stream: int) -> None:
        self._move(stream, len(self.told[stream]))

    def _move(self, stream: int, count: int) -> None:
        for _ in range(count):
            ctypes.memmove(*self.told[stream].popleft())
            self.moved += 1
