"""What a process was told of engines and where it sent requests, written down, so that its decisions can be replayed.

One JSON object a line, in the order of the calls:

    {"setup": {"routing", "engines", "share", "blocks", "delay_s", "seed"}}                                     first
    {"update": engine, "promise": [...]}     {"up": engine, "is": bool}     {"forget": engine}
    {"add": engine}                          {"drop": engine}
    {"report": engine, "outcome", "at_s"}    {"started": number, "cached_tokens"}    {"unstarted": number}
    {"place" or "keeper": [engine, reason] or null, "at_s", "ask": [...], "but": [engine, ...]}

`number`: of the placement, the first is 1. Times are of the promises' clock.
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
from roseinfer.router.base import Ask, Placement
from roseinfer.router.breaker import Outcome
from roseinfer.router.placer import BLOCKS, Placer

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0


class RecordingPlacer(Placer):
    """A `Placer` that writes its calls to a file, which is emptied first and which nobody else may read.

    Raises `ConfigError` if that cannot be written; a disk that is full later ends the recording only.
    """

    def __init__(
        self,
        path: str | Path,
        routing: str,
        engines: Iterable[int],
        *,
        share: int = 1,
        blocks: int = BLOCKS,
        delay_s: float = 0.0,
        seed: int | None = None,
    ) -> None:
        numbers = list(engines)
        seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        super().__init__(routing, (), share=share, blocks=blocks, delay_s=delay_s, seed=seed)
        for number in numbers:  # as told with the setup
            super().add(number)
        self._up: dict[int, bool] = {}  # as written
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise ConfigError(f"record: {path} cannot be written: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._flushed_s = -inf
        setup = {"routing": routing, "engines": numbers, "share": share, "blocks": blocks}
        self._write({"setup": setup | {"delay_s": delay_s, "seed": seed}})

    def add(self, engine: int) -> None:
        super().add(engine)
        self._write({"add": engine})

    def drop(self, engine: int) -> None:
        super().drop(engine)
        self._up.pop(engine, None)
        self._write({"drop": engine})

    def update(self, engine: int, promise: Promise) -> None:
        super().update(engine, promise)
        self._write({"update": engine, "promise": promise})

    def set_up(self, engine: int, up: bool) -> None:
        super().set_up(engine, up)
        if self._up.get(engine) is not up:  # it is said again and again
            self._up[engine] = up
            self._write({"up": engine, "is": up})

    def forget(self, engine: int) -> None:
        super().forget(engine)
        self._write({"forget": engine})

    def report(self, engine: int, outcome: Outcome, now_s: float) -> None:
        super().report(engine, outcome, now_s)
        self._write({"report": engine, "outcome": outcome.value, "at_s": now_s})

    def place(self, ask: Ask, now_s: float, but: Container[int] = ()) -> Placement | None:
        return self._placed("place", super().place(ask, now_s, but), ask, now_s, but)

    def keeper(self, ask: Ask, now_s: float, but: Container[int] = ()) -> Placement | None:
        return self._placed("keeper", super().keeper(ask, now_s, but), ask, now_s, but)

    def started(self, placement: Placement, cached_tokens: int) -> None:
        super().started(placement, cached_tokens)
        self._write({"started": placement.number, "cached_tokens": cached_tokens})

    def ended_unstarted(self, placement: Placement) -> None:
        super().ended_unstarted(placement)
        self._write({"unstarted": placement.number})

    def close(self) -> None:
        """Nothing is written any more; placing goes on."""
        try:
            self._file.close()
        except OSError as error:
            log.error("the end of the recording is lost: %s", error)

    def _placed(
        self, how: str, placement: Placement | None, ask: Ask, now_s: float, but: Container[int]
    ) -> Placement | None:
        where = None if placement is None else [placement.engine, placement.reason]
        left_out = [engine for engine in self._views if engine in but]
        self._write({how: where, "at_s": now_s, "ask": ask._replace(keys=list(ask.keys)), "but": left_out})
        if now_s >= self._flushed_s + FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._flush()
        return placement

    def _flush(self) -> None:
        """Out of this process, which may be killed."""
        try:
            if not self._file.closed:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("recording ends here: %s", error)
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)
