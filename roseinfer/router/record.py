"""Recording of a `Placer`'s calls and decisions to a file, for replay.

One JSON object per line, in the order of the calls:

    {"setup": {"routing", "engines", "share", "blocks", "delay_s", "seed"}}                                     first
    {"update": engine, "promise": [...]}     {"up": engine, "is": bool}     {"forget": engine}
    {"add": engine}                          {"drop": engine}
    {"report": engine, "outcome", "at_s"}    {"started": number, "cached_tokens"}    {"unstarted": number}
    {"place" or "keeper": [engine, reason] or null, "at_s", "ask": [...], "but": [engine, ...]}

`number`: of the placement, starting at 1. "keeper" is `Placer.place_retry`. Times are on the promises' clock.
"""

import random
from collections.abc import Container, Iterable
from pathlib import Path

from roseinfer.core.promise import Promise
from roseinfer.core.recorder import Recorder
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.breaker import AttemptOutcome
from roseinfer.router.placer import DEFAULT_BLOCKS, Placer


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
        self._recorder = Recorder(path)
        setup = {"routing": routing, "engines": numbers, "share": share, "blocks": blocks}
        self._recorder.begin({"setup": setup | {"delay_s": delay_s, "seed": seed}})

    def add(self, engine: int) -> None:
        super().add(engine)
        self._recorder.write({"add": engine})

    def remove(self, engine: int) -> None:
        super().remove(engine)
        self._available.pop(engine, None)
        self._recorder.write({"drop": engine})

    def update(self, engine: int, promise: Promise) -> None:
        super().update(engine, promise)
        self._recorder.write({"update": engine, "promise": promise})

    def set_available(self, engine: int, available: bool) -> None:
        super().set_available(engine, available)
        if self._available.get(engine) is not available:  # callers repeat it with every look at the engine
            self._available[engine] = available
            self._recorder.write({"up": engine, "is": available})

    def reset(self, engine: int) -> None:
        super().reset(engine)
        self._recorder.write({"forget": engine})

    def report(self, engine: int, outcome: AttemptOutcome, now_s: float) -> None:
        super().report(engine, outcome, now_s)
        self._recorder.write({"report": engine, "outcome": outcome.value, "at_s": now_s})

    def place(self, request: RoutingRequest, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        return self._record("place", super().place(request, now_s, excluded), request, now_s, excluded)

    def place_retry(self, request: RoutingRequest, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        return self._record("keeper", super().place_retry(request, now_s, excluded), request, now_s, excluded)

    def on_first_token(self, placement: Placement, cached_tokens: int) -> None:
        super().on_first_token(placement, cached_tokens)
        self._recorder.write({"started": placement.number, "cached_tokens": cached_tokens})

    def on_unprefilled(self, placement: Placement) -> None:
        super().on_unprefilled(placement)
        self._recorder.write({"unstarted": placement.number})

    def close(self) -> None:
        """Stop recording. Placement still works."""
        self._recorder.close()

    def _record(
        self, call: str, placement: Placement | None, request: RoutingRequest, now_s: float, excluded: Container[int]
    ) -> Placement | None:
        decision = None if placement is None else [placement.engine, placement.reason]
        excluded_engines = [engine for engine in self.views if engine in excluded]
        self._recorder.write(
            {call: decision, "at_s": now_s, "ask": request._replace(keys=list(request.keys)), "but": excluded_engines}
        )
        self._recorder.flush_if_due(now_s)
        return placement
