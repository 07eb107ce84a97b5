"""Recording of a `Placer`'s calls and decisions to a file, for replay.

One JSON object per line, in the order of the calls:

    {"setup": {"routing", "engines", "share", "blocks", "delay_s", "seed"}}                                     first
    {"update": engine, "promise": [...]}     {"up": engine, "is": bool}     {"forget": engine}
    {"add": engine}                          {"drop": engine}
    {"report": engine, "outcome", "at_s"}    {"started": number, "cached_tokens"}    {"unstarted": number}
    {"place" or "keeper": [engine, reason] or null, "at_s", "ask": [...], "but": [engine, ...]}

`number`: of the placement, starting at 1. "keeper" is `Placer.place_retry`. Times are on the promises' clock.
"""

import json
import logging
import os
import random
from collections.abc import Container, Iterable
from math import inf
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.promise import Promise
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.breaker import AttemptOutcome
from roseinfer.router.placer import DEFAULT_BLOCKS, Placer

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0


class RecordingPlacer(Placer):
    """`Placer` that writes its calls to a file. The file is truncated, and readable by its owner only.

    Raise `ConfigError` if the file cannot be opened. A later write error only ends the recording.
    """

    def __init__(
        self,
        path: str | Path,
        routing: str,
        engines: Iterable[int],
        *,
        share: int = 1,
        blocks: int = DEFAULT_BLOCKS,
        delay_s: float = 0.0,
        seed: int | None = None,
    ) -> None:
        numbers = list(engines)
        seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        super().__init__(routing, (), share=share, blocks=blocks, delay_s=delay_s, seed=seed)
        for number in numbers:  # the setup record names them
            super().add(number)
        self._available: dict[int, bool] = {}  # as recorded
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ConfigError(f"record: cannot write '{path}': {error.strerror}") from error
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._flushed_s = -inf
        setup = {"routing": routing, "engines": numbers, "share": share, "blocks": blocks}
        self._write({"setup": setup | {"delay_s": delay_s, "seed": seed}})

    def add(self, engine: int) -> None:
        super().add(engine)
        self._write({"add": engine})

    def remove(self, engine: int) -> None:
        super().remove(engine)
        self._available.pop(engine, None)
        self._write({"drop": engine})

    def update(self, engine: int, promise: Promise) -> None:
        super().update(engine, promise)
        self._write({"update": engine, "promise": promise})

    def set_available(self, engine: int, available: bool) -> None:
        super().set_available(engine, available)
        if self._available.get(engine) is not available:  # callers repeat it with every look at the engine
            self._available[engine] = available
            self._write({"up": engine, "is": available})

    def reset(self, engine: int) -> None:
        super().reset(engine)
        self._write({"forget": engine})

    def report(self, engine: int, outcome: AttemptOutcome, now_s: float) -> None:
        super().report(engine, outcome, now_s)
        self._write({"report": engine, "outcome": outcome.value, "at_s": now_s})

    def place(self, request: RoutingRequest, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        return self._record("place", super().place(request, now_s, excluded), request, now_s, excluded)

    def place_retry(self, request: RoutingRequest, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        return self._record("keeper", super().place_retry(request, now_s, excluded), request, now_s, excluded)

    def on_first_token(self, placement: Placement, cached_tokens: int) -> None:
        super().on_first_token(placement, cached_tokens)
        self._write({"started": placement.number, "cached_tokens": cached_tokens})

    def on_unprefilled(self, placement: Placement) -> None:
        super().on_unprefilled(placement)
        self._write({"unstarted": placement.number})

    def close(self) -> None:
        """Stop recording. Placement still works."""
        try:
            self._file.close()
        except OSError as error:
            log.error("cannot write the end of the router recording: %s", error)

    def _record(
        self, call: str, placement: Placement | None, request: RoutingRequest, now_s: float, excluded: Container[int]
    ) -> Placement | None:
        decision = None if placement is None else [placement.engine, placement.reason]
        excluded_engines = [engine for engine in self.views if engine in excluded]
        self._write(
            {call: decision, "at_s": now_s, "ask": request._replace(keys=list(request.keys)), "but": excluded_engines}
        )
        if now_s >= self._flushed_s + FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._flush()
        return placement

    def _flush(self) -> None:
        """Write buffered records to the file, so that a killed process loses at most a second of them."""
        try:
            if not self._file.closed:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("the router recording ends: %s", error)
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)
